"""Find the supported architecture nearest to a checkpoint, and the differences.

Each architecture parses the checkpoint's config. The result is the fields that it reads, the fields
that it rejects, and the tensors that it would load. The nearest shares most tensor names, with
numbers ignored. Among equals it rejects the smallest number of fields and reads most.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, ModelError
from quire.models.checkpoint.files import safetensors_shapes, weight_files
from quire.models.outline import outline
from quire.models.registry import MODELS
from quire.spec.config_defaults import defaults_of
from quire.spec.config_fields import shown
from quire.spec.model_spec import ModelSpec, parse_spec, read_config

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

# Other names of sizes in configs.
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "vocab_size": ("padded_vocab_size",),
}
# Fields about training, tokens and names of classes, which change no numbers.
WITHOUT_EFFECT = re.compile(
    r"_.*|.*(dropout|pdrop|_token_id|_coef|initializer.*|init_.*)|architectures|model_type|auto_map"
    r"|(torch_)?dtype|transformers_version|use_cache|return_dict|output_.*|id2label|label2id"
    r"|problem_type|pretraining_tp|is_encoder_decoder|is_decoder|chunk_size_feed_forward"
)
MIN_SIMILARITY = 0.7  # minimum similarity of names, by difflib's measure
PLAINEST = "llama"
MAX_REFUSED = 8  # an architecture that rejects more fields is not near


@dataclass(frozen=True)
class FieldDifference:
    """A field of the config that the nearest architecture rejects or ignores. `ours` is a text
    about the nearest field that it has."""

    name: str
    value: Any
    ours: str
    is_refused: bool


@dataclass(frozen=True)
class TensorDifference:
    """A tensor with a different shape, or on one side only."""

    name: str  # with `N` for numbers
    theirs: Shape | None  # shape in the checkpoint; None if missing
    ours: Shape | None  # shape in the architecture; None if missing
    count: int  # number of tensors with this name


@dataclass(frozen=True)
class Nearest:
    """The nearest architecture, and the differences from it."""

    model_type: str  # type of the architecture
    shared: int  # names of tensors that both have
    count: int  # names of tensors that either has
    fields: tuple[FieldDifference, ...]
    tensors: tuple[TensorDifference, ...]
    only_ours: int  # fields that it reads and the config lacks
    spec_differs: tuple[str, ...]  # ModelSpec's numbers that differ if the type is unknown

    @property
    def is_same(self) -> bool:
        return not self.fields and not self.tensors

    @property
    def likeness(self) -> tuple[float, int, bool, int]:
        """The sort key: larger is nearer; ties go to the plainest architecture."""
        num_fields = len(self.fields) + sum(field.is_refused for field in self.fields)
        share = self.shared / max(1, self.count)
        return share, -num_fields, self.model_type == PLAINEST, -self.only_ours


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config and tensor shapes; no shapes if it has no weights."""

    directory: Path
    config: dict[str, Any]
    shapes: Shapes

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a directory's config and the headers of its weights.

    Raises ModelError for an invalid checkpoint, and ConfigError for a supported type."""
    config = read_config(directory)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{directory / 'config.json'} has no model_type.")
    if model_type in MODELS:
        raise ConfigError(
            f"models of type {model_type!r} are supported already; compare this one with"
            f" transformers by `quire verify {directory}`."
        )
    try:
        shapes: Shapes = safetensors_shapes(weight_files(directory))
    except ModelError:
        if any(directory.glob("*.safetensors")):
            raise
        shapes = {}
    return Checkpoint(directory, config, shapes)


def find_nearest(checkpoint: Checkpoint) -> Nearest:
    """Compare with all architectures. Raises ModelError if none can read the config's sizes."""
    found = [each for each in (compare(checkpoint, name) for name in MODELS) if each is not None]
    if not found:
        raise ModelError(
            f"none of the architectures {', '.join(sorted(MODELS))} takes the sizes of"
            f" {checkpoint.directory / 'config.json'}; begin with models/model.py."
        )
    return max(found, key=lambda each: each.likeness)


def compare(checkpoint: Checkpoint, model_type: str) -> Nearest | None:
    """Return the differences from one architecture; None if it cannot read the config."""
    made = _understood(checkpoint, model_type)
    if made is None:
        return None
    spec, expected, read, refused = made
    theirs, ours = _by_pattern(_with_prefix(checkpoint.shapes, expected)), _by_pattern(expected)
    tensors = [] if not theirs else list(_tensor_differences(theirs, ours))
    read |= _read_of_sizes(_with_our_names(checkpoint.config, model_type))
    fields = [*refused, *_unread(checkpoint.config, model_type, read, refused)]
    return Nearest(
        model_type,
        len(theirs.keys() & ours.keys()),
        len(theirs.keys() | ours.keys()),
        tuple(fields),
        tuple(tensors),
        len(read - checkpoint.config.keys()),
        tuple(_spec_differs(spec, checkpoint.model_type)),
    )


# ---- fields ----------------------------------------------------------------------------------


class _Noted(dict[str, Any]):
    """A config that records which of its fields are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.accessed: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.accessed.add(name)
        return super().get(name, default)


def _understood(
    checkpoint: Checkpoint, model_type: str
) -> tuple[ModelSpec, Shapes, set[str], list[FieldDifference]] | None:
    """Return spec, tensors, read fields and rejected fields of the config in one architecture.

    Rejected fields are removed until the rest is accepted."""
    config, refused = _with_our_names(checkpoint.config, model_type), list[FieldDifference]()
    while len(refused) <= MAX_REFUSED:
        found = _attempt(config)
        if not isinstance(found, ModelError):
            return (*found, refused)
        name = _refused_field(config, str(found))
        if name is None:
            return None
        reason = str(found).removeprefix("config.json: ")
        refused.append(FieldDifference(name, config.pop(name), reason, True))
    return None


def _with_our_names(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the config with its sizes under quire's names, and with the type."""
    found = {**config, "model_type": model_type}
    for name, others in OTHER_NAMES.items():
        value = next((config[each] for each in others if isinstance(config.get(each), int)), None)
        if found.get(name) is None and value is not None:
            found[name] = value
    if found.get("num_key_value_heads") is None and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def _attempt(config: Mapping[str, Any]) -> tuple[ModelSpec, Shapes, set[str]] | ModelError:
    noted = _Noted(config)
    try:
        spec = parse_spec(noted)
        parts = outline(spec).parts
    except ModelError as error:
        return error
    return spec, {n: shape for part in parts for n, shape in part.tensors.items()}, noted.accessed


def _read_of_sizes(config: Mapping[str, Any]) -> set[str]:
    """Return the fields that are read for the sizes, also with a switch in its other position, or
    without a list of layers."""
    found: set[str] = set()
    for name, value in config.items():
        for excluded in ((), ("layer_types",)):
            changed = {n: v for n, v in config.items() if n not in excluded}
            noted = _Noted(changed | ({name: not value} if isinstance(value, bool) else {}))
            with suppress(ModelError):
                parse_spec(noted)
            found |= noted.accessed
    return found


def _refused_field(config: Mapping[str, Any], message: str) -> str | None:
    """Return the field whose removal changes or removes the error; None if there is none."""
    named = [name for name in config if name != "model_type" and name in message]
    for name in (*named, *(name for name in config if name not in named)):
        found = _attempt({key: value for key, value in config.items() if key != name})
        if name != "model_type" and (not isinstance(found, ModelError) or str(found) != message):
            return name
    return None


def _unread(
    config: Mapping[str, Any], model_type: str, read: set[str], refused: Sequence[FieldDifference]
) -> Iterable[FieldDifference]:
    excluded = {field.name for field in refused}
    excluded |= {each for others in OTHER_NAMES.values() for each in others}
    for name, value in config.items():
        is_read = name in read or name in excluded or WITHOUT_EFFECT.fullmatch(name)
        if not is_read and value is not None and value is not False:
            yield FieldDifference(name, value, _nearest_field(name, model_type, read), False)


def _nearest_field(name: str, model_type: str, read: set[str]) -> str:
    """Return a text about the field with the most similar name."""
    close = get_close_matches(name, sorted(read), n=1, cutoff=MIN_SIMILARITY)
    if not close:
        return f"{model_type} does not read a similar field"
    default = defaults_of(model_type).get(close[0])
    value = "" if default is None else f", {shown(default)} if absent"
    return f"{model_type} reads {close[0]}{value}"


def _spec_differs(spec: ModelSpec, unknown_type: str) -> Iterable[str]:
    """Yield the names of sizes that are read differently if the type is unknown."""
    try:
        other = parse_spec({**spec.raw, "model_type": unknown_type})
    except ModelError:
        yield "all of it"
        return
    for name in (
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "layer_windows",
        "tie_embeddings",
    ):
        if getattr(spec, name) != getattr(other, name):
            yield name


# ---- tensors ---------------------------------------------------------------------------------


def _with_prefix(shapes: Shapes, expected: Shapes) -> Shapes:
    """Return the tensors with a whole model's prefix, which base models' tensors lack."""
    prefixes = {"", *(f"{name.split('.')[0]}." for name in expected if "." in name)}
    renamed = ({f"{prefix}{name}": s for name, s in shapes.items()} for prefix in prefixes)
    return max(renamed, key=lambda each: len(each.keys() & expected.keys()))


def _by_pattern(shapes: Shapes) -> dict[str, list[Shape]]:
    """Return the shapes by name, with `N` in place of numbers."""
    found: dict[str, list[Shape]] = {}
    for name, shape in shapes.items():
        found.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "N", name), []).append(shape)
    return found


def _tensor_differences(
    theirs: Mapping[str, list[Shape]], ours: Mapping[str, list[Shape]]
) -> Iterable[TensorDifference]:
    def first(shapes: Sequence[Shape] | None) -> Shape | None:
        return shapes[0] if shapes else None

    for name in theirs:
        if name not in ours or sorted(theirs[name]) != sorted(ours[name]):
            yield TensorDifference(
                name, first(theirs[name]), first(ours.get(name)), len(theirs[name])
            )
    for name in ours:
        if name not in theirs:
            yield TensorDifference(name, None, first(ours[name]), len(ours[name]))

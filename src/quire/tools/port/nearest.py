"""Which of our architectures a checkpoint is nearest to, and what differs.

Each architecture is asked what it would make of the checkpoint's config: which fields it reads,
which it refuses, which tensors it would ask for. Nearest is the one with most names of tensors in
common, numbers in them left out, then the one that refuses fewest and reads most fields.
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

# What a size is called where it is not called as we do.
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "vocab_size": ("padded_vocab_size",),
}
# Of training, of tokens and of how a class is called: they change no numbers.
WITHOUT_EFFECT = re.compile(
    r"_.*|.*(dropout|pdrop|_token_id|_coef|initializer.*|init_.*)|architectures|model_type|auto_map"
    r"|(torch_)?dtype|transformers_version|use_cache|return_dict|output_.*|id2label|label2id"
    r"|problem_type|pretraining_tp|is_encoder_decoder|is_decoder|chunk_size_feed_forward"
)
ALIKE = 0.7  # of names: difflib's measure
PLAINEST = "llama"
MOST_REFUSED = 8  # fields of a config; one that refuses more is not near


@dataclass(frozen=True)
class FieldDifference:
    """A field of the config that the nearest architecture refuses, or does not read. ours: what it
    has instead."""

    name: str
    value: Any
    ours: str
    is_refused: bool


@dataclass(frozen=True)
class TensorDifference:
    """A tensor, with `N` for numbers in its name. shapes: there and in ours, None where there is
    none. count: how many there are of it."""

    name: str
    theirs: Shape | None
    ours: Shape | None
    count: int


@dataclass(frozen=True)
class Nearest:
    """model_type: ours. shared, count: names of tensors that both have, and that either has.
    only_ours: fields that it reads and the config does not have. spec_differs: names of ModelSpec's
    numbers that are read in another way if the type is unknown."""

    model_type: str
    shared: int
    count: int
    fields: tuple[FieldDifference, ...]
    tensors: tuple[TensorDifference, ...]
    only_ours: int
    spec_differs: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return not self.fields and not self.tensors

    @property
    def likeness(self) -> tuple[float, int, bool, int]:
        """Rank: the larger the nearer; the plainest where nothing else tells."""
        num_fields = len(self.fields) + sum(field.is_refused for field in self.fields)
        share = self.shared / max(1, self.count)
        return share, -num_fields, self.model_type == PLAINEST, -self.only_ours


@dataclass(frozen=True)
class Checkpoint:
    """shapes: of its tensors; empty if it has no weights."""

    directory: Path
    config: dict[str, Any]
    shapes: Shapes

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a directory's config and the headers of its weights. Raises ModelError for what is not
    one, and ConfigError for a type that is supported."""
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
    """Compare with all of ours. Raises ModelError if none takes the config's sizes."""
    found = [each for each in (compare(checkpoint, name) for name in MODELS) if each is not None]
    if not found:
        raise ModelError(
            f"none of the architectures {', '.join(sorted(MODELS))} takes the sizes of"
            f" {checkpoint.directory / 'config.json'}; begin with models/model.py."
        )
    return max(found, key=lambda each: each.likeness)


def compare(checkpoint: Checkpoint, model_type: str) -> Nearest | None:
    """Tell what differs from one of ours; None if it can make nothing of the config."""
    made = _understood(checkpoint, model_type)
    if made is None:
        return None
    spec, wanted, read, refused = made
    theirs, ours = _by_pattern(_with_prefix(checkpoint.shapes, wanted)), _by_pattern(wanted)
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
    """A config that remembers which of its fields were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def _understood(
    checkpoint: Checkpoint, model_type: str
) -> tuple[ModelSpec, Shapes, set[str], list[FieldDifference]] | None:
    """Return what an architecture makes of the config without the fields that it refuses: spec,
    tensors, fields that it read, and those that it refused."""
    config, refused = _with_our_names(checkpoint.config, model_type), list[FieldDifference]()
    while len(refused) <= MOST_REFUSED:
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
    """Add sizes under our names, and the type."""
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
    return spec, {n: shape for part in parts for n, shape in part.tensors.items()}, noted.asked


def _read_of_sizes(config: Mapping[str, Any]) -> set[str]:
    """Return what is read for the sizes also where a switch stands the other way, or where layers
    are not listed one by one."""
    found: set[str] = set()
    for name, value in config.items():
        for left_out in ((), ("layer_types",)):
            changed = {n: v for n, v in config.items() if n not in left_out}
            noted = _Noted(changed | ({name: not value} if isinstance(value, bool) else {}))
            with suppress(ModelError):
                parse_spec(noted)
            found |= noted.asked
    return found


def _refused_field(config: Mapping[str, Any], message: str) -> str | None:
    """Find the field without which the config is not refused, or for another reason."""
    named = [name for name in config if name != "model_type" and name in message]
    for name in (*named, *(name for name in config if name not in named)):
        found = _attempt({key: value for key, value in config.items() if key != name})
        if name != "model_type" and (not isinstance(found, ModelError) or str(found) != message):
            return name
    return None


def _unread(
    config: Mapping[str, Any], model_type: str, read: set[str], refused: Sequence[FieldDifference]
) -> Iterable[FieldDifference]:
    left_out = {field.name for field in refused}
    left_out |= {each for others in OTHER_NAMES.values() for each in others}
    for name, value in config.items():
        is_read = name in read or name in left_out or WITHOUT_EFFECT.fullmatch(name)
        if not is_read and value is not None and value is not False:
            yield FieldDifference(name, value, _nearest_field(name, model_type, read), False)


def _nearest_field(name: str, model_type: str, read: set[str]) -> str:
    """Say what an architecture has that is called alike."""
    close = get_close_matches(name, sorted(read), n=1, cutoff=ALIKE)
    if not close:
        return f"{model_type} does not read a similar field"
    default = defaults_of(model_type).get(close[0])
    value = "" if default is None else f", {shown(default)} if absent"
    return f"{model_type} reads {close[0]}{value}"


def _spec_differs(spec: ModelSpec, unknown_type: str) -> Iterable[str]:
    """Name the sizes that are read in another way where the type is not known."""
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


def _with_prefix(shapes: Shapes, wanted: Shapes) -> Shapes:
    """Return the tensors under the names of a whole model, which those of its base leave out."""
    prefixes = {"", *(f"{name.split('.')[0]}." for name in wanted if "." in name)}
    renamed = ({f"{prefix}{name}": s for name, s in shapes.items()} for prefix in prefixes)
    return max(renamed, key=lambda each: len(each.keys() & wanted.keys()))


def _by_pattern(shapes: Shapes) -> dict[str, list[Shape]]:
    """Group tensors by name, with `N` in place of numbers."""
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

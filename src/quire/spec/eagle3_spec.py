"""What the config of an EAGLE-3 head says (arXiv 2503.01840), in either of its two layouts, without
torch.

The authors' (SafeAILab) is a Llama's config with `draft_vocab_size`; that of `speculators` has its
layer in `transformer_layer_config`. Which states of the target a head reads, a config says in two
ways: `eagle_aux_hidden_state_layer_ids` at the top names the layers that they enter; inside of
`eagle_config`, those that they leave, one less. Without either they enter 2, n / 2 and n - 3.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError
from quire.spec.config_defaults import defaults_of
from quire.spec.config_fields import Fields
from quire.spec.model_spec import MAX_VOCABULARY, ModelSpec, parse_spec, read_config

MODEL_TYPE = "eagle3"  # of the spec of a head
LAYER_TYPES = ("llama", "qwen3")
READS = "eagle_aux_hidden_state_layer_ids"
FORMAT, LAYER = "speculators_model_type", "transformer_layer_config"
NORM_OF_ALL, NORM_OF_EACH = "norm_before_fc", "fc_norm"
# Of variants that compute something else.
REFUSED = ("parallel_drafting",)


@dataclass(frozen=True)
class HeadOptions:
    """reads: the head reads what enters these layers of the target. target_size: its width.
    num_ids: how many tokens it can guess. norm_first: its residual stream begins after the norm of
    the state. qk_norm: query and key heads are normalised. norm_of_all, norm_of_each: what is read
    is normalised, all together or each layer's. norm_last: it goes on from its normed state."""

    reads: tuple[int, ...]
    target_size: int
    num_ids: int
    norm_first: bool
    qk_norm: bool
    norm_of_all: bool = False
    norm_of_each: bool = False
    norm_last: bool = False


def head_spec(directory: Path, target: ModelSpec) -> ModelSpec:
    """Read the config of a head for this target. Raises ModelError, saying what to do, for what is
    no such head, and for one that was made for another model."""
    raw = read_config(directory)
    layer_raw = _layer_config(raw, directory)
    layer_type = layer_raw.get("model_type", "llama")
    if layer_type not in LAYER_TYPES:
        raise ModelError(
            f"the EAGLE-3 head in {directory} has layers of type {layer_type!r}; supported are"
            f" {' and '.join(LAYER_TYPES)}. Take another head, or another method of"
            " speculative_config."
        )
    layer_raw = {**defaults_of(layer_type), **layer_raw, "model_type": layer_type}
    spec, fields = parse_spec(layer_raw), Fields(raw)
    spec.check()
    for name in REFUSED:
        if fields.flag(name):
            raise fields.error(name, "heads of this variant are not supported; take one without it")
    target_size = fields.integer("target_hidden_size", default=spec.hidden_size)
    num_ids = fields.integer("draft_vocab_size", default=spec.vocab_size, most=MAX_VOCABULARY)
    _check_target(directory, target, hidden_size=target_size, vocab_size=spec.vocab_size)
    if num_ids > spec.vocab_size:
        raise fields.error("draft_vocab_size", f"it is at most vocab_size, {spec.vocab_size}")
    options = HeadOptions(
        reads=_reads(fields, target),
        target_size=target_size,
        num_ids=num_ids,
        norm_first=fields.flag("norm_before_residual"),
        qk_norm=layer_type == "qwen3",
        norm_of_all=fields.flag(NORM_OF_ALL),
        norm_of_each=fields.flag(NORM_OF_EACH),
        norm_last=fields.flag("norm_output"),
    )
    if options.norm_of_all and options.norm_of_each:
        raise fields.error(NORM_OF_ALL, f"a head has that or {NORM_OF_EACH}: download it again")
    return replace(
        spec,
        model_type=MODEL_TYPE,
        tie_embeddings=False,
        max_position=max(spec.max_position, target.max_position),
        raw=layer_raw | {MODEL_TYPE: asdict(options)},
    )


def head_options(spec: ModelSpec) -> HeadOptions:
    """Return the options of a head's spec."""
    return HeadOptions(**spec.raw[MODEL_TYPE])


def _layer_config(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return what says how the layers are made, in either layout."""
    fields = Fields(raw)
    if fields.has(FORMAT):
        if fields.value(FORMAT) != MODEL_TYPE:
            raise fields.error(FORMAT, f"only {MODEL_TYPE} is supported: take such a head")
        if fields.inner(LAYER) is None:
            raise ModelError(f"{directory}/config.json has no {LAYER}: download it again.")
        layer: dict[str, Any] = raw[LAYER]
        return layer
    named = fields.texts("architectures") or ()
    if fields.has("draft_vocab_size") or any("Eagle3" in name for name in named):
        return raw
    raise ModelError(
        f"{directory} is not an EAGLE-3 head: its config.json has neither {FORMAT} nor"
        " draft_vocab_size. For a separate small model, use the method draft_model."
    )


def _reads(fields: Fields, target: ModelSpec) -> tuple[int, ...]:
    num = target.num_layers
    inner = fields.inner("eagle_config") or Fields({})
    if not inner.flag("use_aux_hidden_state", True):
        raise inner.error("use_aux_hidden_state", "heads that read the last layer only are not run")
    found = fields.integers(READS) or tuple(layer + 1 for layer in inner.integers(READS))
    reads = found or (2, num // 2, num - 3)
    if len(set(reads)) < len(reads) or min(reads) < 0 or max(reads) > num:
        which = f"{READS} says" if found else f"without {READS} it reads"
        raise ModelError(
            f"an EAGLE-3 head reads layers that differ, from 0 to {num} of this model; {which}"
            f" {', '.join(map(str, reads))}. Take the head that was trained for this model, or"
            f" correct {READS} in its config.json."
        )
    return reads


def _check_target(directory: Path, target: ModelSpec, **sizes: int) -> None:
    """Raise ModelError if the head's target has other sizes, by their names in ModelSpec."""
    for name, size in sizes.items():
        if size != getattr(target, name):
            raise ModelError(
                f"the EAGLE-3 head in {directory} is for another model: its target's {name} is"
                f" {size}, this model's {getattr(target, name)}. Take the head that was trained for"
                " this model."
            )

"""Read the config of an EAGLE-3 head (arXiv 2503.01840), in either of two layouts. No torch.

The authors' layout (SafeAILab) is a Llama config with `draft_vocab_size`. The layout of
`speculators` has the layer's config in `transformer_layer_config`.

The head reads hidden states of the target model. `eagle_aux_hidden_state_layer_ids` at the top
level names the layers whose inputs it reads; within `eagle_config`, the layers whose outputs it
reads. Without either field the head reads the inputs of layers 2, n / 2 and n - 3.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ModelError
from quire.spec.config_defaults import defaults_of
from quire.spec.config_fields import Fields
from quire.spec.model_spec import MAX_VOCABULARY, ModelSpec, parse_spec, read_config

MODEL_TYPE = "eagle3"  # model type in the spec of a head
LAYER_TYPES = ("llama", "qwen3")
READS = "eagle_aux_hidden_state_layer_ids"
FORMAT, LAYER = "speculators_model_type", "transformer_layer_config"
NORM_OF_ALL, NORM_OF_EACH = "norm_before_fc", "fc_norm"
# Fields of variants that compute something else.
REFUSED = ("parallel_drafting",)


@dataclass(frozen=True)
class HeadOptions:
    """The options of a head."""

    reads: tuple[int, ...]  # layers of the target whose inputs the head reads
    target_size: int  # hidden size of the target
    num_ids: int  # size of the vocabulary of draft tokens
    norm_first: bool  # whether the residual stream starts after the norm of the hidden state
    qk_norm: bool  # whether query and key heads are normalized
    norm_of_all: bool = False  # whether the concatenated hidden states are normalized
    norm_of_each: bool = False  # whether each layer's hidden state is normalized
    norm_last: bool = False  # whether the next draft step starts from the normalized state


def head_spec(directory: Path, target: ModelSpec) -> ModelSpec:
    """Read the config of a head for this target. Raises ModelError for another kind of model, and
    for a head of another target."""
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
    num_ids = fields.integer("draft_vocab_size", default=spec.vocab_size, maximum=MAX_VOCABULARY)
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
    """Return the config of the head's layer, from either layout."""
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
    """Raise ModelError if the head expects other sizes, named as in ModelSpec."""
    for name, size in sizes.items():
        if size != getattr(target, name):
            raise ModelError(
                f"the EAGLE-3 head in {directory} is for another model: its target's {name} is"
                f" {size}, this model's {getattr(target, name)}. Take the head that was trained for"
                " this model."
            )

"""Numbers of a transformers model, found by running its layers instead of reading config names."""

from pathlib import Path
from typing import Any

import torch

from quire.base.errors import ModelError
from quire.models.checkpoint.files import weight_files
from quire.models.hf.build import empty
from quire.models.hf.configs import Architecture, architecture
from quire.models.load.contents import tensor_names
from quire.spec.config_fields import Fields
from quire.spec.model_options import refuse_what_is_ignored
from quire.spec.model_spec import COMPILED, DTYPE_BYTES, PART_OF, TIES, TRANSFORMERS, ModelSpec
from quire.spec.quantization_config import quantization_config

HEAD = "lm_head.weight"  # suffix of its name, in every layout of a larger model
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def transformers_spec(
    raw: dict[str, Any], directory: Path, *, is_compiled: bool = False
) -> ModelSpec:
    """Return the spec of a model. directory: of the checkpoint. is_compiled: whether torch compiles
    the class. Raise MissingDependency without the package, and ModelError if it cannot run over
    paged memory."""
    fields = Fields(raw)
    refuse_what_is_ignored(fields, "")
    quantization_config(fields)
    found = architecture(raw)
    if found.is_part and _has_own_head(raw, found, directory):
        raw = raw | {TIES: False}
        found = architecture(raw)
    config = found.config
    made = empty(found, torch.float32)
    facts = [made.seen.attention[layer] for layer in range(len(made.seen.attention))]
    hidden = made.seen.hidden_size
    return ModelSpec(
        model_type=fields.text("model_type", ""),
        num_layers=len(facts),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(config, hidden),
        num_heads=facts[0].num_heads,
        num_kv_heads=facts[0].num_kv_heads,
        head_dim=facts[0].head_dim,
        vocab_size=made.seen.vocab_size,
        max_position=_max_position(config),
        dtype=_dtype(raw),
        tie_embeddings=bool(made.model.all_tied_weights_keys),
        layer_windows=tuple(each.window for each in facts),
        eos_token_ids=_tokens(raw, config, "eos_token_id"),
        bos_token_id=next(iter(_tokens(raw, config, "bos_token_id")), None),
        implementation=COMPILED if is_compiled else TRANSFORMERS,
        raw=raw | ({PART_OF: raw["model_type"]} if found.is_part else {}),
    )


def _has_own_head(raw: dict[str, Any], found: Architecture, directory: Path) -> bool:
    """Return whether a text part has an untied head although transformers' class of the whole ties
    it. Classes such as Mistral3's tie by default, even if a checkpoint stores a head and its config
    does not set tying. transformers keeps such a head untied."""
    inner = raw.get("text_config")
    is_set = raw.get(TIES) is not None or (isinstance(inner, dict) and inner.get(TIES) is True)
    if is_set or not found.config.tie_word_embeddings:
        return False
    try:
        names = list(tensor_names(weight_files(directory)))
    except ModelError:  # the loader reports the missing files
        return True
    return any(name.endswith(HEAD) for name in names)


def _intermediate_size(config: Any, hidden: int) -> int:
    """Return the size of the largest feed-forward layer, as Gemma 3n has one size per layer."""
    found = getattr(config, "intermediate_size", None)
    sizes = found if isinstance(found, list) else [found]
    return max((each for each in sizes if isinstance(each, int)), default=0) or 4 * hidden


def _max_position(config: Any) -> int:
    for name in LENGTHS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    raise ModelError(
        f"config.json does not set the maximum sequence length (none of {', '.join(LENGTHS)})."
    )


def _dtype(raw: dict[str, Any]) -> str:
    inner = raw.get("text_config")
    for each in (raw, inner if isinstance(inner, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if each.get(name) in DTYPE_BYTES:
                return str(each[name])
    return "float32"


def _tokens(raw: dict[str, Any], config: Any, name: str) -> tuple[int, ...]:
    """Return a token's ids, from the whole model's config or else the text part's."""
    found = raw.get(name, getattr(config, name, None))
    return Fields({name: found}).integers(name)

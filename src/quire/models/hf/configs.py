"""Choice of the transformers class for a config; refusal of configs that cannot be computed
exactly.

Only classes of the installed package are used. Code in a checkpoint (`auto_map`) is ignored.

For the text part of some vision models, transformers has no text-generation class. Its class of the
whole model generates text with a text model (Qwen2VLTextModel), a vision model and a plain linear
head. The class created here omits the vision model. The rotary embedding takes three positions for
each token (time, height, width). For text, all three are the token's index in the sequence, so it
is the usual rotary embedding.
"""

import importlib.util
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.base.errors import MissingDependency, ModelError
from quire.spec.linear_attention import HYBRID_TYPES
from quire.spec.model_spec import PART_OF, TIES

# Text parts whose full model adds only a plain linear head. The value is the type of the full
# model, by which transformers finds how checkpoints store experts.
PLAIN_HEADS = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "glm4v_text": "glm4v",
    "glm4v_moe_text": "glm4v_moe",
    "glm_ocr_text": "glm_ocr",
}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def with_head(config: Any) -> Any | None:
    """Return the class of a text part with its head; None for types outside PLAIN_HEADS. config:
    the text part's transformers config."""
    if config.model_type not in PLAIN_HEADS:
        return None
    from transformers import MODEL_MAPPING
    from transformers.modeling_outputs import CausalLMOutput

    text_class: Any = MODEL_MAPPING[type(config)]
    around: Any = text_class.__base__  # knows how to initialise its modules

    class TextModel(around):  # type: ignore[misc]
        _tied_weights_keys = {HEAD: TABLE}  # noqa: RUF012 (as transformers has it)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, **inputs: Any) -> Any:
            return CausalLMOutput(logits=self.lm_head(self.model(**inputs)[0]))

    TextModel.__name__ = text_class.__name__
    return TextModel


EXTRA = 'pip install "quire[transformers]"'
# Config fields that do not describe the model: location of its code, and output options.
IGNORED_FIELDS = (
    "auto_map", "quantization_config", "return_dict", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", PART_OF,
)  # fmt: skip
# The frequencies depend on the longest sequence of a step, so the tokens of a request would depend
# on its neighbours.
UNSTEADY_ROPES = ("dynamic", "longrope")
# Layer types that store something other than the keys and values of tokens.
STATES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent")
CHUNKS = "chunked_attention"
MAX_REASON = 400  # maximum characters of a transformers error


@dataclass(frozen=True)
class Architecture:
    """Model class and config of a checkpoint. config: transformers' config of the model, or of the
    text part of a multimodal one. model_class: the class up to and including the head. is_part:
    whether config is such a text part."""

    config: Any
    model_class: Any
    is_part: bool


def is_available() -> bool:
    """Return whether the transformers package is installed, without importing it."""
    return importlib.util.find_spec("transformers") is not None


def architecture(raw: Mapping[str, Any]) -> Architecture:
    """Return the class of a config. Raise MissingDependency without the package. Raise ModelError
    for a config that the package does not know, or that cannot be computed exactly here."""
    if not is_available():
        raise MissingDependency(
            f"models of type {raw.get('model_type')!r} run by classes of the transformers package,"
            f" which is not installed: {EXTRA}."
        )
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers {__version__} does not support models of type {model_type!r}; a newer"
            " one may. Code that comes with a checkpoint is never run, also with trust_remote_code."
        )
    values = {name: value for name, value in raw.items() if name not in IGNORED_FIELDS}
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # any error of its checks
        raise ModelError(f"transformers refuses config.json: {_in_one_line(error)}") from error
    config = whole.get_text_config(decoder=True)
    if config is not whole:  # the class of the whole decides by its own config whether to tie
        ties = getattr(config, TIES, False)
        config.tie_word_embeddings = getattr(whole, TIES, ties)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    else:
        model_class = with_head(config)
    if model_class is None:
        raise ModelError(
            f"transformers has no text-generation class for {config.model_type!r}; only these text"
            f" parts run without one: {', '.join(PLAIN_HEADS)}."
        )
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    _refuse(config)
    return Architecture(config, model_class, config is not whole)


def _refuse(config: Any) -> None:
    for name in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(config, name, False):
            raise ModelError(
                f"config.json: {name} is true; models with encoders are not supported."
            )
    if config.model_type in HYBRID_TYPES:
        raise ModelError(
            f"transformers' class of {config.model_type} cannot run over paged memory: layers with"
            " states need one of quire's classes."
        )
    _refuse_layers(config)
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type")
        if kind in UNSTEADY_ROPES:
            raise ModelError(
                f"config.json: rope_type is {kind!r}; transformers' class chooses its frequencies"
                " by the longest sequence of a batch, so neighbours would change a request's"
                " tokens."
            )


def _refuse_layers(config: Any) -> None:
    """Raise ModelError for types of layers that do not fit in a cache of keys and values."""
    kinds = getattr(config, "layer_types", None)
    kinds = list(kinds) if isinstance(kinds, list | tuple) else []
    for kind in (*STATES, CHUNKS):
        if kind in kinds:
            layers = [index for index, each in enumerate(kinds) if each == kind]
            why = (
                "attend within chunks of the sequence (attention_chunk_size)"
                if kind == CHUNKS
                else "keep a state, which the cache does not support"
            )
            raise ModelError(
                f"transformers' class of {config.model_type} cannot run over paged memory: its"
                f" layers {reprlib.repr(layers)} are {kind!r} (layer_types) and {why}. Use a model"
                " whose layers all attend in full or within a window."
            )


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embeddings of a config: one, or one per layer type."""
    if isinstance(parameters, Mapping):
        inner = [each for each in parameters.values() if isinstance(each, Mapping)]
        yield from inner or [parameters]


def _in_one_line(error: Exception) -> str:
    """Return the message of an error in one line. transformers' checks name the field, then the
    reason."""
    text = " ".join(str(error).split()) or repr(error)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."

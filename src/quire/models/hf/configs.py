"""Which class of the transformers package runs a config, and what of it could not be kept exact.

Only classes of the installed package are taken: what a checkpoint brings of its own (`auto_map`) is
ignored.

Where transformers has no class for the text part of a model that also sees, its own class writes
text with a text model (Qwen2VLTextModel), a vision model, and a plain linear head. The class made
here leaves the vision model out. The rotary embedding takes three positions for each token (of
time, height and width). For text all three are the token's place in the sequence, so it is the
usual rotary embedding.
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

# Text parts on which the class of the whole puts a plain linear head and nothing else, and the type
# of the whole, by which transformers finds how checkpoints store experts.
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
    """Return the class of a text part and its head; None for a type that is not one of these.
    config: transformers' of the text part."""
    if config.model_type not in PLAIN_HEADS:
        return None
    from transformers import MODEL_MAPPING
    from transformers.modeling_outputs import CausalLMOutput

    text_class: Any = MODEL_MAPPING[type(config)]
    around: Any = text_class.__base__  # which knows how its modules begin

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
# Of a config, but not of the model: where its code is, and what its outputs hold beside logits.
LEFT_OUT = (
    "auto_map", "quantization_config", "return_dict", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", PART_OF,
)  # fmt: skip
# Their frequencies follow the longest sequence of a step, so a request's tokens would follow
# its neighbours.
UNSTEADY_ROPES = ("dynamic", "longrope")
# Kinds of layers that keep something other than the keys and values of a token.
STATES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent")
CHUNKS = "chunked_attention"
MAX_REASON = 400  # characters of an error of transformers


@dataclass(frozen=True)
class Architecture:
    """config: transformers' of the model, or of the text part of one that also sees or hears.
    model_class: what is made of it, up to the head. is_part: whether it is such a part."""

    config: Any
    model_class: Any
    is_part: bool


def is_available() -> bool:
    """Tell whether the transformers package is installed. It is not imported."""
    return importlib.util.find_spec("transformers") is not None


def architecture(raw: Mapping[str, Any]) -> Architecture:
    """Find the class of a config. Raises MissingDependency, and ModelError for what the package
    does not know, or what cannot be exact here."""
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
            " one may. Code that comes with a checkpoint is never run."
        )
    values = {name: value for name, value in raw.items() if name not in LEFT_OUT}
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # whatever its checks raise
        raise ModelError(f"transformers refuses config.json: {_in_one_line(error)}") from error
    config = whole.get_text_config(decoder=True)
    if config is not whole:  # whose class ties the head or does not, by its own config
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
    """Raise ModelError for kinds of layers that have no place in a cache of keys and values."""
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
    """Yield the rotary embeddings of a config: one, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        inner = [each for each in parameters.values() if isinstance(each, Mapping)]
        yield from inner or [parameters]


def _in_one_line(error: Exception) -> str:
    """Return what an error says; the checks of transformers say which field first, then why."""
    text = " ".join(str(error).split()) or repr(error)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."

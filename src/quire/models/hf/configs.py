"""Which class of the transformers package runs a config, and what of it could not be kept exact.

Only classes of the installed package are taken: what a checkpoint brings of its own (`auto_map`) is
never looked at.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.base.errors import MissingDependency, ModelError
from quire.base.linear_attention import HYBRID_TYPES
from quire.base.text_config import PART_OF

EXTRA = 'pip install "quire[transformers]"'
# Of a config, but not of the model: where its code is, and what its outputs hold beside logits.
LEFT_OUT = (
    "auto_map", "quantization_config", "return_dict", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", PART_OF,
)  # fmt: skip
# Their frequencies follow the longest sequence of a step, so a request's tokens would follow
# its neighbours.
UNSTEADY_ROPES = ("dynamic", "longrope")


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
            f"transformers {__version__} knows no models of type {model_type!r}; a newer one may."
            " Code that comes with a checkpoint is never run."
        )
    values = {name: value for name, value in raw.items() if name not in LEFT_OUT}
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # whatever its checks raise
        raise ModelError(f"transformers refuses config.json: {_first_line(error)}") from error
    config = whole.get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"transformers has no class that writes text for {config.model_type!r}.")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
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
            f"transformers' class of {config.model_type} cannot run over paged memory: layers that"
            " remember a state run by quire's own classes."
        )
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type")
        if kind in UNSTEADY_ROPES:
            raise ModelError(
                f"config.json: rope_type is {kind!r}; transformers' class chooses its frequencies"
                " by the longest sequence of a batch, so neighbours would change a request's"
                " tokens."
            )


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embeddings of a config: one, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        inner = [each for each in parameters.values() if isinstance(each, Mapping)]
        yield from inner or [parameters]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), repr(error))

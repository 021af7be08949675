"""Which class implements which `model_type`: ours, and those of other packages."""

from collections.abc import Callable

import torch
from torch import nn

from quire.base import plugins
from quire.base.errors import ModelError
from quire.base.model_spec import ModelSpec
from quire.models.cohere2 import Cohere2
from quire.models.gemma2 import Gemma2
from quire.models.gemma3 import Gemma3
from quire.models.gpt2 import GPT2
from quire.models.granite import Granite
from quire.models.layers import ParamFactory
from quire.models.llama import Llama
from quire.models.mistral import Mistral
from quire.models.model import Model
from quire.models.olmo2 import Olmo2
from quire.models.opt import OPT
from quire.models.phi3 import Phi3
from quire.models.qwen2 import Qwen2
from quire.models.qwen3 import Qwen3
from quire.models.qwen3_moe import Qwen3Moe
from quire.models.smollm3 import SmolLM3

MODELS: dict[str, Callable[[ModelSpec, ParamFactory], Model]] = {
    "cohere2": Cohere2,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "gpt2": GPT2,
    "granite": Granite,
    "llama": Llama,
    "mistral": Mistral,
    "olmo2": Olmo2,
    "opt": OPT,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "smollm3": SmolLM3,
}


def make_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Model:
    """Make the model with uninitialised parameters. Raises ModelError for an unknown model_type."""
    return model_class(spec.model_type)(spec, ParamFactory(dtype, device)).eval()


def model_class(model_type: str) -> Callable[[ModelSpec, ParamFactory], Model]:
    """One of ours, or of another package. Raises ModelError, naming all, if there is none."""
    if model_type in MODELS:
        return MODELS[model_type]
    kind = plugins.MODELS
    if not plugins.is_installed(kind, model_type, MODELS):
        known = plugins.all_names(kind, sorted(MODELS))
        raise ModelError(f"models of type {model_type!r} are not supported; supported are {known}.")
    found: type[Model] = plugins.load_plugin(kind, model_type, MODELS)
    if not issubclass(found, nn.Module):
        raise ModelError(f"the class {found.__qualname__} for {model_type!r} is no nn.Module.")
    return found

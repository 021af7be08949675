"""Which class implements which `model_type`."""

from collections.abc import Callable

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.base.model_spec import ModelSpec
from quire.models.gpt2 import GPT2
from quire.models.layers import Place
from quire.models.llama import Llama
from quire.models.mistral import Mistral
from quire.models.opt import OPT
from quire.models.qwen2 import Qwen2
from quire.models.qwen3 import Qwen3

MODELS: dict[str, Callable[[ModelSpec, Place], nn.Module]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "mistral": Mistral,
    "opt": OPT,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def make_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with uninitialised parameters. Raises ModelError for an unknown model_type."""
    check_supported(spec.model_type)
    return MODELS[spec.model_type](spec, Place(dtype, device)).eval()


def check_supported(model_type: str) -> None:
    """Raise ModelError, naming the supported ones, if there is no class for this model_type."""
    if model_type not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ModelError(f"models of type {model_type!r} are not supported; supported are {known}.")

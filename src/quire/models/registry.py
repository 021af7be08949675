"""Choose the class that implements a `model_type`: a class of quire, of a plug-in package, or else
of transformers."""

from collections import ChainMap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quire.base import plugins
from quire.base.errors import ConfigError, ModelError
from quire.models.checkpoint.rank_place import WHOLE, RankPlace
from quire.models.deepseek.deepseek import Deepseek
from quire.models.deepseek.glm4_moe import Glm4Moe
from quire.models.deepseek.minicpm3 import MiniCPM3
from quire.models.eagle3 import Eagle3
from quire.models.encoders.bert import Bert, Roberta
from quire.models.encoders.modernbert import ModernBert
from quire.models.families.cohere2 import Cohere2
from quire.models.families.gemma import Gemma2, Gemma3
from quire.models.families.glm4 import Glm4
from quire.models.families.gpt2 import GPT2
from quire.models.families.gpt_neox import GPTNeoX
from quire.models.families.gpt_oss import GptOss
from quire.models.families.granite import Granite
from quire.models.families.llama import Llama
from quire.models.families.llama4 import Llama4
from quire.models.families.mistral import Mistral, Mixtral
from quire.models.families.olmo2 import Olmo2
from quire.models.families.opt import OPT
from quire.models.families.phi3 import Phi3
from quire.models.families.smollm3 import SmolLM3
from quire.models.hf.configs import EXTRA, is_available
from quire.models.hf.spec import transformers_spec
from quire.models.model import Model
from quire.models.mtp import MultiTokenHead
from quire.models.multimodal.gemma3 import Gemma3Images
from quire.models.multimodal.llava import Llava, LlavaNext
from quire.models.multimodal.qwen2_5_vl import Qwen25VL
from quire.models.multimodal.qwen2_vl import Qwen2VL
from quire.models.multimodal.qwen3_vl import Qwen3VL
from quire.models.parts.layers import ParamFactory
from quire.models.qwen.qwen2 import Qwen2
from quire.models.qwen.qwen2_moe import Qwen2Moe
from quire.models.qwen.qwen3 import Qwen3
from quire.models.qwen.qwen3_5 import Qwen3_5
from quire.models.qwen.qwen3_moe import Qwen3Moe
from quire.models.qwen.qwen3_next import Qwen3Next
from quire.models.transformers_model import TransformersModel
from quire.spec import eagle3_spec
from quire.spec.gguf.container import is_gguf
from quire.spec.model_spec import (
    PART_OF,
    QUIRE,
    TRANSFORMERS,
    ModelSpec,
    load_spec,
    read_config,
    text_part,
)

MODELS: dict[str, Callable[[ModelSpec, ParamFactory], Model]] = {
    "cohere2": Cohere2,
    "deepseek_v2": Deepseek,
    "deepseek_v3": Deepseek,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "glm4": Glm4,
    "glm4_moe": Glm4Moe,
    "glm4_moe_lite": Deepseek,
    "gpt2": GPT2,
    "gpt_neox": GPTNeoX,
    "gpt_oss": GptOss,
    "granite": Granite,
    "llama": Llama,
    "llama4_text": Llama4,
    "minicpm3": MiniCPM3,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "olmo2": Olmo2,
    "opt": OPT,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_5_moe_text": Qwen3_5,
    "qwen3_5_text": Qwen3_5,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
    "smollm3": SmolLM3,
}
# Models with bidirectional attention: they pool, and do not generate.
ENCODERS: dict[str, Callable[[ModelSpec, ParamFactory], Model]] = {
    "bert": Bert,
    "camembert": Roberta,
    "modernbert": ModernBert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
OWN = ChainMap(MODELS, ENCODERS)
# Models that read images, by the model_type of the whole model.
MULTIMODAL: dict[str, Callable[[ModelSpec, ParamFactory], Model]] = {
    "gemma3": Gemma3Images,
    "llava": Llava,
    "llava_next": LlavaNext,
    "qwen2_5_vl": Qwen25VL,
    "qwen2_vl": Qwen2VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
}


def model_spec(
    directory: Path, implementation: str = "auto", *, is_compiled: bool = False
) -> ModelSpec:
    """Read a model's config and choose the implementation that runs it.

    implementation: `quire`, `transformers`, or `auto`, which uses transformers only for types that
    neither quire nor a plug-in implements. is_compiled: whether torch compiles transformers' class.

    Raises ModelError, and MissingDependency if transformers is requested and absent. Raises
    ConfigError if transformers is to run a GGUF file, or torch is to compile a class of quire.
    """
    is_file = is_gguf(directory)
    if implementation == TRANSFORMERS and is_file:
        raise ConfigError(
            "model_impl is transformers, but GGUF files need one of quire's classes; remove it."
        )
    raw = {} if is_file else read_config(directory)
    model_type = text_part(raw).get("model_type")
    is_unknown = isinstance(model_type, str) and not _is_ours(model_type) and is_available()
    if implementation == TRANSFORMERS or (implementation == "auto" and is_unknown):
        return transformers_spec(raw, directory, is_compiled=is_compiled)
    if is_compiled:
        raise ConfigError(
            "torch_compile needs a model that runs by a class of transformers; quire's class for"
            " this one is compiled already. Remove it."
        )
    return load_spec(directory)


def make_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, place: RankPlace = WHOLE
) -> Model:
    """Build the model, or a rank's part of it, with uninitialised parameters. Raises ModelError for
    an unknown model_type."""
    return class_of(spec)(spec, ParamFactory(dtype, device, place)).eval()


def class_of(spec: ModelSpec) -> Callable[[ModelSpec, ParamFactory], Model]:
    """Return the class of a spec's model. Raises ModelError as model_class does."""
    if spec.implementation != QUIRE:
        return TransformersModel
    if spec.model_type == eagle3_spec.MODEL_TYPE:
        return Eagle3
    if spec.multi_token is not None:
        return MultiTokenHead
    whole = spec.raw.get(PART_OF)
    if isinstance(whole, str) and whole in MULTIMODAL:
        return MULTIMODAL[whole]
    return model_class(spec.model_type)


def model_class(model_type: str) -> Callable[[ModelSpec, ParamFactory], Model]:
    """Return the class of quire or of a plug-in. Raises ModelError, which lists all types, if there
    is none."""
    if model_type in OWN:
        return OWN[model_type]
    if not _is_ours(model_type):
        known = plugins.all_names(plugins.MODELS, sorted(OWN))
        raise ModelError(
            f"the model type {model_type!r} is not supported; supported are {known}. To try the"
            f" implementation of transformers, {EXTRA}, and keep model_impl=auto."
        )
    found: type[Model] = plugins.load_plugin(plugins.MODELS, model_type, OWN)
    if not issubclass(found, nn.Module):
        raise ModelError(f"the class {found.__qualname__} for {model_type!r} is not an nn.Module.")
    return found


def can_share(spec: ModelSpec) -> bool:
    """Return whether ranks can share the model's layers: for quire's classes, and for plug-ins that
    set `shares_layers`."""
    found = class_of(spec)
    is_ours = spec.model_type in OWN or spec.model_type == eagle3_spec.MODEL_TYPE
    return is_ours or (isinstance(found, type) and bool(vars(found).get("shares_layers")))


def _is_ours(model_type: str) -> bool:
    return model_type in OWN or plugins.is_installed(plugins.MODELS, model_type, OWN)

"""Models in stages whose first layers add features of the vision tower (DeepStack)."""

from pathlib import Path

from quire.base.config import EngineConfig
from quire.base.config_fields import Fields
from quire.base.errors import ConfigError
from quire.base.gguf import is_gguf
from quire.base.model_spec import ModelSpec, read_config
from quire.base.stages import layers_of_stage
from quire.models.vision.qwen3_vl import Qwen3VLVisionSpec

FAMILIES = ("qwen3_vl", "qwen3_vl_moe")


def check_deepstack(config: EngineConfig, spec: ModelSpec, directory: Path) -> None:
    """Raise ConfigError if layers of a later stage would add features: only the first stage has
    them. directory: the model's."""
    raw = {} if is_gguf(directory) else read_config(directory)
    if raw.get("model_type") not in FAMILIES:
        return
    num = len(Qwen3VLVisionSpec.from_config(Fields(raw), spec.hidden_size).deepstack_blocks)
    stages = config.parallel.pipeline_parallel_size
    first = len(layers_of_stage(spec.num_layers, 0, stages))
    if num > first:
        raise ConfigError(
            f"pipeline_parallel_size={stages} leaves {first} layers to the first stage, but the"
            f" first {num} layers of this model add features of images, which no other stage has."
            " Use fewer stages, or tensor_parallel_size."
        )

"""Load other weights for a running model, packed and traced, so that a swap is immediate.

The new model has the spec, dtype and weight formats of the running one. Both are in memory until
the swap, which replaces one reference. A model that cannot be replaced is refused with its reason.
"""

from dataclasses import replace
from pathlib import Path

import torch

from quire.base.errors import ConfigError, ModelError
from quire.models.checkpoint.formats import weight_formats
from quire.models.load.loading import LoadOptions, load_model
from quire.models.parts.determinism import make_deterministic
from quire.models.parts.routes import record_routes
from quire.models.registry import model_spec
from quire.runner.memory_plan import available_cpu_bytes
from quire.runner.model_runner import DecoderModel
from quire.runner.native_model import native_or_same
from quire.runner.setup.built import BuiltRunner
from quire.spec.gguf.container import is_gguf
from quire.spec.model_options import ROTARY_TYPES
from quire.spec.model_spec import ModelSpec

# Fields and options of a spec that the new weights' config must share.
COMPARED = (
    "model_type", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads",
    "head_dim", "vocab_size", "tie_embeddings", "layer_windows", "linear_layers",
)  # fmt: skip
OPTIONS = ("layers", "rope", "experts", "quantization")


class FreedModel:
    """Stands for a model whose weights were freed. No step may run."""

    def __call__(self, *_: object) -> torch.Tensor:
        raise AssertionError("a step needs weights that were freed")

    logits = __call__


def stage_weights(built: BuiltRunner, path: Path) -> DecoderModel:
    """Load the weights of a directory of *.safetensors files, or of a GGUF file, for a running
    model. The directory needs no config.json; if it has one, it must describe the same model.

    Steps may run meanwhile. Raises ModelError for other, missing or broken tensors, OutOfMemory if
    both models do not fit, and ConfigError for a model whose weights cannot be replaced.
    """
    _check_replaceable(built)
    if not path.exists():
        raise ModelError(f"{path} does not exist on the engine's machine; check the path.")
    _check_same(built.config.model.model_impl, built.spec, path)
    return _load(built, path, LoadOptions())


def stage_again(
    built: BuiltRunner, path: Path, load_format: str, patch: Path | None
) -> DecoderModel:
    """Load the weights of files that a running model was loaded from, with a patch. load_format,
    patch: see LoadOptions. Raises as `stage_weights` does."""
    _check_replaceable(built)
    return _load(built, path, LoadOptions(load_format, built.config.model.seed, patch=patch))


def _load(built: BuiltRunner, path: Path, options: LoadOptions) -> DecoderModel:
    """Load, pack and trace a model for a running one's backend."""
    config = built.config
    formats, room = weight_formats(config.model), available_cpu_bytes()
    options = replace(options, formats=formats, max_bytes=room)
    model = load_model(path, built.spec, built.dtype, built.device, options)
    if config.deterministic:
        make_deterministic(model)
    if config.model.enable_return_routed_experts:
        record_routes(model)
    native: DecoderModel = native_or_same(model, built.runner.backend)
    return native


def _check_replaceable(built: BuiltRunner) -> None:
    reason = why_fixed(built)
    if reason is not None:
        raise ConfigError(f"the weights of this engine cannot be replaced: {reason}.")


def why_fixed(built: BuiltRunner) -> str | None:
    """Return why the weights of a model cannot be replaced, or None."""
    if built.device_type != "cpu":
        return "recorded steps on a GPU hold addresses of the old ones; start the engine again"
    if built.stage is not None or built.spec.num_ranks > 1:
        return "they are divided among ranks; use one process (no -tp, no -pp)"
    if built.spec.encoder is not None:
        return "its encoder is not replaced yet"
    if built.spec.pooling is not None:
        return "its pooling layers are not replaced yet"
    if built.config.lora.enable_lora:
        return "adapters are attached to the layers of the old ones; remove enable_lora"
    if built.drafter_reads_target:
        return "its draft head reads the old ones; use another speculative method"
    return None


def free_weights(built: BuiltRunner) -> None:
    """Drop the model, which must be replaceable. No step may run before another one is loaded."""
    _check_replaceable(built)
    built.runner.model = FreedModel()


def _check_same(impl: str, spec: ModelSpec, path: Path) -> None:
    """Raise ModelError if the config next to the new weights describes another model."""
    if not is_gguf(path) and not (path / "config.json").exists():
        return
    other = model_spec(path, impl)
    different = [name for name in COMPARED if getattr(other, name) != getattr(spec, name)]
    if other.model_type == spec.model_type:
        options = [name for name in OPTIONS if spec.model_type in ROTARY_TYPES or name != "rope"]
        different += [name for name in options if getattr(other, name) != getattr(spec, name)]
    if different:
        raise ModelError(
            f"the config of {path} describes another model than the running one (different:"
            f" {', '.join(different)}); start an engine for it instead."
        )

"""The header of an adapter (LoRA) that llama.cpp's converter wrote as a GGUF file. No torch.

    general.type         adapter
    adapter.type         lora
    adapter.lora.alpha   scale of all modules, divided by their ranks; 0: a scale of 1

The tensors of a module are NAME.weight.lora_a [R, K] and NAME.weight.lora_b [N, R], where NAME is
llama.cpp's name for the module.
"""

from pathlib import Path

from quire.base.errors import ModelError
from quire.spec.adapter_config import MAX_ALPHA, AdapterConfig
from quire.spec.gguf.container import GGUFFile

TYPE, KIND, ALPHA = "general.type", "adapter.type", "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
DOWN_GGUF, UP_GGUF = ".lora_a", ".lora_b"
Shapes = dict[str, tuple[int, ...]]


def read_gguf_adapter(path: Path) -> tuple[Shapes, AdapterConfig]:
    """Return the shape of each tensor as numpy writes it, and the scales. Raises ModelError for
    another kind of file."""
    file = GGUFFile(path, is_whole=False)
    if file.integer("split.count", 1) > 1:
        raise ModelError(
            f"{path} is one part of a split file; merge the parts with llama-gguf-split --merge."
        )
    if file.text(TYPE, "model") != "adapter" or file.text(KIND, "") != "lora":
        raise ModelError(
            f"{path} is a GGUF file, but no adapter: {TYPE} must be adapter, and {KIND} lora. Give"
            " a file of llama.cpp's converter of adapters."
        )
    if INVOCATION in file.metadata:
        raise ModelError(
            f"{path} has {INVOCATION}, which quire does not support; use an adapter that applies to"
            " all tokens."
        )
    alpha = file.number(ALPHA, 0.0)
    if not -MAX_ALPHA <= alpha <= MAX_ALPHA:  # NaN fails, too
        raise ModelError(f"{path}: {ALPHA} must be a number up to {MAX_ALPHA:g}, got {alpha}.")
    shapes = {name: place.shape for name, place in file.tensors.items()}
    return shapes, AdapterConfig(alpha, is_unscaled=alpha == 0)

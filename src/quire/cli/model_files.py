"""Find the model and the device of a command, and check its settings, before a model is loaded.

`run` and `serve` also choose a quantization if the weights do not fit otherwise."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.settings.config import EngineConfig, ModelConfig, config_from_flat
from quire.cli import machine
from quire.cli.sampling import sampling_params
from quire.cli.settings import given_settings

if TYPE_CHECKING:
    from quire.models.checkpoint.source import ModelSource
    from quire.tools.devices import Device

CONFIG = "config.json"
MIB, GIB = 1 << 20, 1 << 30
QUANTIZATIONS = ("int8", "int4")  # tried in this order, best quality first
LARGE_SHARE = 0.5  # of the memory; smaller weights are not why a model does not fit
DEVICE_HELP = (
    "device: cpu, cuda, a GPU's name such as H100, or a size such as 24GB; by default this"
    " machine's GPU, else its CPU"
)


def find_config(model: ModelConfig) -> "ModelSource":
    """Return the source of a model's config; a path of config.json works too. Raises
    ModelNotFound."""
    from quire.models.checkpoint.source import CONFIG_ONLY, ModelSource, resolve_source

    path = Path(model.model)
    if path.name == CONFIG and path.is_file():
        folder = path.resolve().parent
        return ModelSource(folder, "dummy", folder.name)
    return resolve_source(model, progress=False, files=CONFIG_ONLY)


def check_input(arguments: argparse.Namespace, *, is_chat: bool) -> None:
    """Check a command's input as far as possible before its model is loaded in this process.

    The checks cover settings, sampling options and the model's config; for conversations also the
    chat template. Raises QuireError."""
    from quire.base.requests.sampling_params import SamplingParams
    from quire.engine.start.preflight import check_before_loading, check_conversations
    from quire.models.checkpoint.source import resolve_source

    sampling_params(arguments, SamplingParams())
    config = config_from_flat(**given_settings(arguments))
    source = resolve_source(config.model)
    check_before_loading(config, source)
    if is_chat:
        check_conversations(config.model, source)


def find_device(name: str) -> "Device":
    """Return this machine's device, or a named device. Raises ConfigError for an unknown one."""
    from quire.runner.memory_plan import available_cpu_bytes
    from quire.tools.devices import CPU, GPU, Device, find_gpu

    plain = name.strip().lower()
    gpus = machine.gpus() if plain in ("auto", GPU) else []
    if gpus:
        size = int(gpus[0]["memory.total"].removesuffix("MiB")) * MIB
        return Device(f"this machine's {gpus[0]['name']}", GPU, size)
    if plain == GPU:
        raise ConfigError(
            "device is cuda, but nvidia-smi lists no GPU on this machine; name a GPU, such as"
            " --device H100, or use --device cpu."
        )
    if plain in ("auto", CPU):
        return Device("this machine's CPU", CPU, available_cpu_bytes())
    return find_gpu(name)


def may_quantise(config: EngineConfig) -> bool:
    """Return whether the settings leave the choice of a quantization to quire."""
    parallel = config.parallel
    is_alone = parallel.num_ranks == 1 and parallel.data_parallel_size == 1
    return is_alone and config.model.quantization is None and config.device in ("auto", "cpu")


def fitting_quantization(config: EngineConfig, source: "ModelSource") -> str | None:
    """Return the best quantization with which a model fits, or None if its settings stay as they
    are: it fits anyway, no quantization helps, or the choice is not ours.

    Only for one model of plain weights in one process on a CPU, and only without `quantization` in
    the settings. A repository of GGUF files has a choice of its own
    (models/library/gguf_choice.py)."""
    num_bytes = _plain_bytes(config, source) if may_quantise(config) else 0
    if not num_bytes:
        return None
    device = find_device(config.device)
    if device.kind != "cpu" or num_bytes <= LARGE_SHARE * device.memory_bytes:
        return None
    from quire.tools.sizing.fit import fit

    for quantization in (None, *QUANTIZATIONS):
        model = dataclasses.replace(config.model, quantization=quantization)
        try:
            fit(dataclasses.replace(config, model=model), source, device)
        except OutOfMemory:
            continue
        except ConfigError:  # such as a dtype without integers
            return None
        return quantization
    return None


def quantization_notice(quantization: str, source: "ModelSource") -> str:
    """Return one line for the user."""
    size = _file_bytes(source) / GIB
    return (
        f"[the weights of {source.name} ({size:.1f} GiB) do not fit this machine's memory; they are"
        f" quantized to {quantization} at load; --quantization none prevents it]"
    )


def _plain_bytes(config: EngineConfig, source: "ModelSource") -> int:
    """Return the size of weights that quire may quantise by itself, else 0."""
    from quire.models.checkpoint.source import load_format_of
    from quire.spec.gguf.container import is_gguf
    from quire.spec.model_spec import read_config, text_part

    if load_format_of(config, source) == "dummy":
        return 0
    if is_gguf(source.directory):
        return 0
    fields = read_config(source.directory)
    stored = ("quantization_config", "compression_config")
    if any(each.get(name) for each in (fields, text_part(fields)) for name in stored):
        return 0
    return _file_bytes(source)


def _file_bytes(source: "ModelSource") -> int:
    from quire.models.checkpoint.files import weight_files

    return sum(path.stat().st_size for path in weight_files(source.directory))

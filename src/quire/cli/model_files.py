"""Find the model and the device of a command, and check its settings, before a model is loaded."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.base.settings.config import ModelConfig, config_from_flat
from quire.cli import machine
from quire.cli.sampling import sampling_params
from quire.cli.settings import given_settings

if TYPE_CHECKING:
    from quire.models.checkpoint.source import ModelSource
    from quire.tools.devices import Device

CONFIG = "config.json"
MIB = 1 << 20
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

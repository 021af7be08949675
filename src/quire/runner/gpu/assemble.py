"""From a model and a backend to a runner of a GPU."""

import torch

from quire.base.config import EngineConfig
from quire.ops.attention.base import AttentionBackend
from quire.ops.kernels.launch import VERSION
from quire.runner.gpu.device import make_device
from quire.runner.gpu.rows import GpuRows
from quire.runner.gpu.runner import GpuRunner
from quire.runner.gpu.sampler import GpuSampler
from quire.runner.gpu.used_sizes import UsedSizes, default_directory
from quire.runner.launched import Runner
from quire.runner.model_runner import DecoderModel

Sizes = tuple[int, int, int, int]  # rows, length, cache groups, tokens of a block


def assemble(
    config: EngineConfig,
    model: DecoderModel,
    backend: AttentionBackend,
    sizes: Sizes,
    vocab_size: int,
    torch_device: torch.device,
) -> GpuRunner:
    """A runner that launches every step as it is."""
    device = make_device(torch_device, forbids_waiting=config.debug_transfers)
    rows = GpuRows(device, *sizes)
    return GpuRunner(model, backend, rows, GpuSampler(device, rows, vocab_size), device)


def record_graphs(runner: Runner, config: EngineConfig, identity: str) -> None:
    """Let a GPU's runner record its decoding steps, unless it shall not. identity: of the model's
    shape, for what is remembered from one start to the next."""
    if config.enforce_eager or not isinstance(runner, GpuRunner):
        return
    facts = [identity, config.compilation, repr(config.deterministic), *_versions(runner)]
    used = UsedSizes(default_directory(), facts)
    runner.record(in_pieces=config.compilation == "piecewise", used=used)


def _versions(runner: GpuRunner) -> tuple[str, ...]:
    device = runner.device.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, str(torch.__version__), str(torch.version.cuda), VERSION

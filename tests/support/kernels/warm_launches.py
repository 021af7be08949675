"""What the warm-up of a model compiles for a GPU, listed and compiled without one:

    python -m tests.support.kernels.warm_launches list MODEL ...    names of the launched kernels
    python -m tests.support.kernels.warm_launches compile ARCH MODEL
    python -m tests.support.kernels.warm_launches unlisted ARCH MODULE ...

A runner is built from a model's real sizes, with few layers and random weights. It records the
steps of its warm-up on a stand-in for a GPU of the compute capability. Its kernels do nothing, and
their launches are noted with all types, constants and options. So the list is what production
compiles on such a GPU. `compile` compiles each noted launch, and prints registers, spilled bytes,
shared memory and late reads as JSON. `unlisted` does so with the CONFIGS of modules that no
warm-up launches.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import quire.models
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint import formats
from quire.models.checkpoint.source import resolve_model
from quire.models.load import loading
from quire.models.parts import experts
from quire.ops import gpu
from quire.ops.host import native
from quire.ops.kernels.launch import Kernel
from quire.ops.weights import device_weights
from quire.runner import memory_plan
from quire.runner.build import build_runner
from quire.runner.device import Device, HostDevice
from quire.runner.gpu import compiling, sizes
from quire.runner.setup import assemble
from tests.support.kernels.aot import compile_config, configs_of, late_reads, resources
from tests.support.kernels.compiled_launches import use

KIB = 1 << 10
# A100, RTX 3090, L40S, H200 and RTX 5090.
GPUS = {
    80: gpu.GPU((8, 0), 108, 163 * KIB),
    86: gpu.GPU((8, 6), 82, 99 * KIB),
    89: gpu.GPU((8, 9), 142, 99 * KIB),
    90: gpu.GPU((9, 0), 132, 227 * KIB),
    120: gpu.GPU((12, 0), 170, 99 * KIB),
}
MIXED_TOKENS = 16, 128, 512, 2048  # of recorded mixed steps; each selects its own tiles
MORE_POSITIONS = 32
SETTINGS: dict[str, Any] = {
    "attention_backend": "triton", "device": "cpu", "dtype": "bfloat16", "load_format": "dummy",
    "max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 2048, "block_size": 16,
    "kv_cache_memory_bytes": 1 << 27, "graph_warmup": True,
    "speculative_config": {"method": "none"},
}  # fmt: skip
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@dataclass(frozen=True)
class Model:
    """shape: a folder of `quire/models/shapes`. changes: of its config.json."""

    shape: str
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


ONE_LAYER = {"num_hidden_layers": 1}
SMALL = ONE_LAYER | {"vocab_size": 1 << 15}
MODELS = {
    "dense": Model("qwen3-0.6b", ONE_LAYER, {"speculative_config": NGRAM, "pipeline_depth": 2}),
    "adapters": Model("qwen3-0.6b", ONE_LAYER, {"enable_lora": True, "max_lora_rank": 16}),
    "fixed": Model("qwen3-0.6b", ONE_LAYER, {"deterministic": True}),
    "int8": Model("qwen3-0.6b", SMALL, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "w4a16": Model("qwen3-0.6b", SMALL, {"quantization": "int4"}),
    "fp8": Model("qwen3-0.6b", SMALL, {"quantization": "fp8"}),
    "experts": Model("qwen3-30b-a3b", SMALL | {"num_experts": 16}),
    "w4a16 experts": Model(
        "qwen3-30b-a3b", SMALL | {"num_experts": 8, "hidden_size": 1024}, {"quantization": "int4"}
    ),
    "latent": Model("deepseek-v2-lite", SMALL | {"num_hidden_layers": 2, "n_routed_experts": 8}),
    "hybrid": Model("qwen3.5-0.8b", SMALL | {"num_hidden_layers": 4}),
    "windows": Model("gemma2-2b", SMALL | {"num_hidden_layers": 2}),
}


@dataclass
class Launch:
    """Arguments of a compilation, as Triton derives them from a launch."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any

    @property
    def name(self) -> str:
        return (
            f"{self.kernel.fn.__module__.removeprefix('quire.ops.kernels.')}.{self.kernel.__name__}"
        )

    @property
    def key(self) -> str:
        """Return what tells launches apart. Two that differ only in alignments are alike."""
        options = [self.options.num_warps, self.options.num_stages, self.options.enable_fp_fusion]
        return repr([self.name, self.signature, sorted(map(repr, self.constants.items())), options])


class _Recording:
    def replay(self) -> None:
        pass


class _RecordingDevice(HostDevice):
    """A device that works at once, and whose recordings are empty."""

    can_capture = True

    def begin_capture(self) -> _Recording:
        return _Recording()

    def end_capture(self, graph: Any) -> None:
        pass


def launches_of(model: Model, arch: int) -> list[Launch]:
    """Return the launches of a model's warm-up on a GPU of the capability, by their keys."""
    use(arch)
    noted: dict[str, Launch] = {}

    def note(kernel: Kernel, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        named |= {"debug": False, "instrumentation_mode": ""}
        _, _, _, backend, binder = kernel.device_caches[0]
        bound, specialization, options = binder(*args, **named)
        packed = kernel._pack_args(backend, named, bound, specialization, options)
        launch = Launch(kernel, *packed[1:], packed[0])
        known = noted.setdefault(launch.key, launch)
        if len(launch.attributes) < len(known.attributes):
            noted[launch.key] = launch

    with tempfile.TemporaryDirectory() as folder, _stand_in(arch):
        _write_config(Path(folder), model)
        config = config_from_flat(model=folder, **SETTINGS | model.settings)
        with mock.patch.object(Kernel, "run", note):
            build_runner(config, resolve_model(folder))
    return sorted(noted.values(), key=lambda each: each.key)


def _write_config(folder: Path, model: Model) -> None:
    source = Path(str(quire.models.__file__)).parent / "shapes" / model.shape / "config.json"
    config = json.loads(source.read_text("utf-8")) | model.changes
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


@contextmanager
def _stand_in(arch: int) -> Iterator[None]:
    """Let operations believe that the CPU is such a GPU, whose kernels leave memory as it is."""

    def failed(*_: Any, **__: Any) -> None:
        raise  # the error of the work that is not compiled ahead

    native.core.cache_clear()
    with ExitStack() as stack:
        for place, name, value in (
            (gpu, "is_gpu", lambda device: True),
            (gpu, "gpu_of", lambda device: GPUS[arch]),
            (loading, "is_gpu", lambda device: True),
            (experts, "is_gpu", lambda device: True),
            (formats, "check_quantization", lambda dtype, device: None),
            (device_weights, "can_pack", lambda dtype, device: False),
            (native, "INTERFACE_VERSION", -1),
            (assemble, "make_device", _make_device),
            (compiling.logger, "debug", failed),
            (torch.nn.functional, "linear", _no_product),
            (torch, "bmm", lambda x, y: x.new_zeros(*x.shape[:2], y.shape[2])),
            (torch, "empty", _zeroing(torch.empty)),
            (torch, "empty_like", _zeroing(torch.empty_like)),
            (torch.Tensor, "new_empty", _zeroing(torch.Tensor.new_empty)),
            (sizes, "MIXED_TOKENS", MIXED_TOKENS),
            (sizes, "WARM_TOKENS", MIXED_TOKENS),
            (sizes, "WARM_TOKENS_OF_ALL", MIXED_TOKENS[2:]),
            (sizes, "MORE_POSITIONS", MORE_POSITIONS),
            (memory_plan, "MIXED_TOKENS", MIXED_TOKENS),
            (memory_plan, "MORE_POSITIONS", MORE_POSITIONS),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def _make_device(device: torch.device, **_: Any) -> Device:
    return _RecordingDevice(device)


def _zeroing(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let new integers be 0, since work of torch indexes by what kernels would have written."""

    def zeroed(*given: Any, **named: Any) -> torch.Tensor:
        found = make(*given, **named)
        is_read = found.device.type != "meta" and not found.is_floating_point()
        return found.zero_() if is_read else found

    return zeroed


def _no_product(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], len(weight))


def compile_launch(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """Return what the compiler makes of a launch."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    binary = triton.compile(source, target=target, options=launch.options.__dict__)
    registers, stack = resources(binary.asm["cubin"])
    names = launch.kernel.arg_names
    return {
        "kernel": launch.name,
        "constants": {names[place[0]]: str(value) for place, value in launch.constants.items()},
        "warps": launch.options.num_warps,
        "stages": launch.options.num_stages,
        "registers": registers,
        "stack": stack,
        "shared": binary.metadata.shared,
        "late_reads": late_reads(binary.asm["ttgir"]),
    }


def compile_all(model: str, arch: int) -> list[dict[str, Any]]:
    target = GPUTarget("cuda", arch, 32)
    return [compile_launch(each, target) for each in launches_of(MODELS[model], arch)]


def compile_unlisted(arch: int, modules: list[str]) -> list[dict[str, Any]]:
    found = []
    for module in modules:
        for config in chain(*configs_of(module, "CONFIGS")):
            each = compile_config(config, reads_machine_code=False, arch=arch)
            found.append(each | {"kernel": f"{module}.{each['kernel']}"})
    return found


def main() -> None:
    what, *given = sys.argv[1:]
    found: Any
    if what == "list":
        found = {name: [each.name for each in launches_of(MODELS[name], 90)] for name in given}
    elif what == "compile":
        found = compile_all(given[1], int(given[0]))
    else:
        found = compile_unlisted(int(given[0]), given[1:])
    print(json.dumps({"found": found, "cpu_s": sum(os.times()[:4])}))


if __name__ == "__main__":
    main()

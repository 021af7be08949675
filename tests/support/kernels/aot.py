"""Compiles kernels without a device: python -m tests.support.kernels.aot STEP MODULE ...
[--capability 90] [--list CONFIGS] [--lower MODULE ...]

Prints JSON with one entry for each of the modules' CONFIGS. If a kernel has more than STEP of them,
each STEPth from the first gets one. An entry holds registers, spilled bytes, shared memory, and
whether the PTX has Hopper's matrix instructions. With STEP 1 it also checks the machine code, which
takes longer to read. It counts products that are fused with sums although the source forbids it. It
also counts conditional reads of a buffer that a loop's next loads write: Triton (3.6) lets these
loads begin first. For kernels that wait for their predecessor it holds the order of memory
instructions in the machine code. A process of its own, since kernels that are interpreted cannot be
compiled. The first launch of each kernel of the modules after --lower becomes Triton's IR only, a
sixth of the work.

Attention is launched in more ways than its CONFIGS have. Their lists, as JSON:

    python -m tests.support.kernels.aot spills ARCH PART    spills and late reads on a capability
    python -m tests.support.kernels.aot latents ARCH PART   the same of latent attention
    python -m tests.support.kernels.aot rotating ARCH PART  the same of attention that rotates heads
    python -m tests.support.kernels.aot loads               copies and conversions of decoding rows
    python -m tests.support.kernels.aot amd MODULE ...      kernels that gfx942 does not take

PART is K/N, for each Nth launch from the Kth (0 to N - 1).

They differ in KV format, head size, tiles, and features that add code. float32 is absent: it spills
registers everywhere (docs/inside/gpu.md).
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from quire.ops.kernels.attention.attention import config as attention_config
from quire.ops.kernels.attention.attention_tiles import WARP_GROUPS, Machine, machine_with
from quire.ops.kernels.attention.latent import config as latent_config
from quire.ops.kernels.attention.rotary_attention import config as rotary_config
from quire.ops.kernels.launch import Config
from tests.support.processes.forks import run_forked

LIMIT_S = 900  # of a program that compiles, on a busy machine
ARCH = 90
ARCHS = (80, 86, 89, 90, 120)
HAS_SPACE = (80, 90)  # for three stages
HAS_FP8 = 89  # the least capability that converts e4m3
SIZES = {64: 8, 80: 1, 96: 4, 128: 4, 192: 2, 256: 2}  # of heads, with query heads of a KV head
# Of latent vectors and their values, with query heads: DeepSeek's, and MiniCPM3's.
LATENTS = {(576, 512): (16, 20, 128), (288, 256): (40,)}
ALL_SCORES = {"window": 128, "has_cap": True, "has_sinks": True}
KINDS: dict[str, dict[str, Any]] = {
    "short": {"has_long": False}, "long": {}, "fixed": {"is_fixed": True},
    "merging": {"has_long": False, "merges_last": True},
}  # fmt: skip
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PARAMETER = re.compile(r"^\s+\.param ", re.MULTILINE)
# A barrier of the program comes before the release; between them is only the load of the ticket.
RELEASE = re.compile(r"bar\.sync[^@]*@\S+ atom\.global\.sys\.release\.exch")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
# A load, a store, the wait for earlier kernels, and the permission for the next one to begin.
MEMORY = {"LDG": "L", "LDGSTS": "L", "STG": "S", "ACQBULK": "W", "PREEXIT": "P"}
# An arrival: a barrier, a fence, an atomic addition, the end of what the cache held, a barrier.
ARRIVAL = {"LDG": "L", "STG": "S", "BAR": "B", "MEMBAR": "M", "ATOMG": "A", "CCTL": "C"}


def compiled(program: str, *arguments: str) -> Any:
    """Return the JSON that `tests.support.kernels.PROGRAM` prints, from a fork that compiles
    kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.support.kernels.{program}", *arguments]
    run = run_forked(command, timeout_s=LIMIT_S, env=environment)
    assert run.returncode == 0, f"{program} ended with {run.returncode}: {run.stderr[-2000:]}"
    return json.loads(run.stdout.splitlines()[-1])


def compile_for(config: Config, target: GPUTarget) -> Any:
    """Return what Triton makes of a launch, by stage: `asm` has ttgir, ptx and cubin."""
    return triton.compile(source_of(config), target=target, options=options_of(config))


def lower(config: Config, target: GPUTarget) -> str:
    """Return Triton's IR of a launch, before any pass of the compiler."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(options_of(config))
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source_of(config).make_ir(target, options, functions, modules, context))


def source_of(config: Config) -> ASTSource:
    """Return the kernel with the types and constants of a launch."""
    names = config.kernel.arg_names
    pointers = [name for name, kind in config.signature.items() if kind.startswith("*")]
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *config.divisible)
    }
    signature = {
        name: "constexpr" if name in config.constants else config.signature[name] for name in names
    }
    constants = {(names.index(name),): value for name, value in config.constants.items()}
    return ASTSource(config.kernel, signature, constants, attributes)


def options_of(config: Config) -> dict[str, Any]:
    """Return the compiler's options of a launch."""
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if is_ordered(config):
        options["enable_fp_fusion"] = False
    return options


def compile_config(config: Config, reads_machine_code: bool, arch: int = ARCH) -> dict[str, Any]:
    """What the machine code takes."""
    binary = compile_for(config, GPUTarget("cuda", arch, 32))
    registers, stack = resources(binary.asm["cubin"])
    return {
        "kernel": config.name or config.kernel.__name__,
        "constants": {name: str(value) for name, value in config.constants.items()},
        "registers": registers,
        "stack": stack,
        "shared": binary.metadata.shared,
        "has_wgmma": config.needs_wgmma
        and "wgmma.mma_async" in binary.asm["ptx"]
        and (not reads_machine_code or _has_wgmma(binary.asm["cubin"])),
        "needs_wgmma": config.needs_wgmma,
        "parameters": len(PARAMETER.findall(binary.asm["ptx"])),
        "arguments": sum(name not in config.constants for name in config.kernel.arg_names),
        "system_releases": len(RELEASE.findall(binary.asm["ptx"])),
        "late_reads": late_reads(binary.asm["ttgir"]),
        "fused": binary.asm["ptx"].count("fma") if is_ordered(config) else None,
        "memory": memory_order(machine_code(binary.asm["cubin"]))
        if config.constants.get("AHEAD")
        else None,
        "arrival": memory_order(machine_code(binary.asm["cubin"]), ARRIVAL)
        if "acq_rel" in binary.asm["ptx"]
        else None,
    }


def memory_order(machine_code: str, letters: dict[str, str] = MEMORY) -> str:
    """The memory instructions and waits as letters, in the order of their addresses."""
    found = re.findall(rf"\b({'|'.join(letters)})\b", machine_code)
    return "".join(letters[name] for name in found)


def late_reads(ttgir: str) -> int:
    """Count the uses, under a condition in a loop, of shared memory that is loaded ahead."""
    regions, loaded, found = list[str](), set[str](), 0
    for line in map(str.strip, ttgir.splitlines()):
        if line.startswith("}"):
            kind = regions.pop() if regions else ""
            if line.endswith("{"):  # else
                regions.append(kind)
            continue
        is_conditional = "if" in regions[regions.index("for") :] if "for" in regions else False
        name, _, right = line.partition(" = ")
        if is_conditional:
            found += bool(set(re.findall(r"%[\w]+", right or line)) & loaded)
        elif "!ttg.memdesc" in right and "mutable>" in right.rpartition("->")[2]:
            loaded.add(name)
        if line.endswith("{"):
            opened = re.search(r"scf\.(for|if)\b", line)
            regions.append(opened[1] if opened else "")
    return found


def is_ordered(config: Config) -> bool:
    """Whether it is attention or its merge with one order of sums, launched without fusion."""
    name = config.kernel.__name__
    is_attention = name in ("_attention_kernel", "_latent_kernel")
    return name == "_ordered_kernel" or (is_attention and config.constants["CHUNK"] > 0)


def resources(cubin: bytes) -> tuple[int, int]:
    found = RESOURCES.search(_run("cuobjdump", "-res-usage", cubin))
    assert found is not None, "cuobjdump tells no resources"
    return int(found[1]), int(found[2])


def _has_wgmma(cubin: bytes) -> bool:
    """Of 16 bits, or of e4m3."""
    return re.search(r"\b[HQ]GMMA\b", machine_code(cubin)) is not None


def machine_code(cubin: bytes) -> str:
    return _run("nvdisasm", "-c", cubin)


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BIN / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def machine_for(arch: int) -> Machine:
    return machine_with(132, arch // 10 in WARP_GROUPS, arch in HAS_SPACE)


def launches(arch: int) -> Iterator[tuple[str, Config]]:
    """Yield the launches on a machine of the capability, with names."""
    machine = machine_for(arch)
    for kv_format in ("auto", "int8", "fp8") if arch >= HAS_FP8 else ("auto", "int8"):
        for kind, given in KINDS.items():
            for size, group_size in SIZES.items():
                extras: list[dict[str, Any]] = [{}]
                extras += [ALL_SCORES] * (size in (64, 256))
                extras += [{"has_ends": True}] * (size in (128, 256) and kind in ("long", "fixed"))
                extras += [{"stores_softmax": True}] * (size == 128)
                extras += [{"dtype": torch.float16}] * (size == 128 and kv_format != "int8")
                for extra in extras:
                    named = {"kv_format": kv_format, "machine": machine} | given | extra
                    name = f"{kv_format} {size} {kind} {' '.join(extra)}".strip()
                    yield name, attention_config(size, group_size, **named)
        if machine.has_warp_groups:
            for size in (64, 128):
                small = attention_config(size, SIZES[size], kv_format=kv_format,
                               machine=machine.with_small_tiles)  # fmt: skip
                yield f"{kv_format} {size} small", small


def latent_launches(arch: int) -> Iterator[tuple[str, Config]]:
    """The same of latent attention."""
    machine = machine_for(arch)
    for kv_format in ("auto", "int8", "fp8") if arch >= HAS_FP8 else ("auto", "int8"):
        for kind, given in KINDS.items():
            if "merges_last" in given:
                continue  # latent attention always merges in a launch of its own
            for sizes, heads in LATENTS.items():
                for num_heads in heads:
                    extras: list[dict[str, Any]] = [{}]
                    extras += [{"dtype": torch.float16}] * (num_heads == 16 and kv_format == "auto")
                    for extra in extras:
                        named = {"has_long": True, "kv_format": kv_format} | given | extra
                        made = latent_config(num_heads, sizes=sizes, machine=machine, **named)
                        name = f"{kv_format} {sizes[0]} {kind} {num_heads} {' '.join(extra)}"
                        yield name.strip(), made


def rotating_launches(arch: int) -> Iterator[tuple[str, Config]]:
    """The same of attention that rotates heads."""
    machine = machine_for(arch)
    sizes = ((64, 7), (64, 8), (64, 16), (80, 1), (96, 4))
    for size, group_size in (*sizes, *((128, group_size) for group_size in (2, 3, 4, 8, 16))):
        extras: list[dict[str, Any]] = [{}, {"has_norm": True}]
        extras += [ALL_SCORES, {"dtype": torch.float16}] * (size == 128)
        for extra in extras:
            for merges_last in (False, True):
                given = extra | {"merges_last": merges_last, "machine": machine}
                name = f"{size} {group_size} {'merging ' * merges_last}{' '.join(extra)}"
                yield name.strip(), rotary_config(size, group_size, **given)


def spills_and_late_reads(list_of: Any, arch: str, part: str) -> list[dict[str, Any]]:
    """list_of: returns the launches on a capability, with names."""
    first, _, step = part.partition("/")
    return [
        {"name": name} | compile_config(each, reads_machine_code=False, arch=int(arch))
        for name, each in islice(list_of(int(arch)), int(first), None, int(step))
    ]


def loads_and_conversions() -> list[dict[str, Any]]:
    """Return, for decoding rows of each format: bytes of each copy into shared memory, and numbers
    of slow conversions."""
    found = []
    for kv_format in ("auto", "int8", "fp8"):
        binary = compile_for(
            attention_config(128, has_long=False, kv_format=kv_format), GPUTarget("cuda", ARCH, 32)
        )
        code = machine_code(binary.asm["cubin"])
        copies = re.findall(r"\bLDGSTS\.E\S*", code)
        bits = [
            int(size[1]) if (size := re.search(r"\.(64|128)$", copy)) else 32 for copy in copies
        ]
        slow = len(re.findall(r"\bF2F\.", code))
        found.append({"kv_format": kv_format, "copies": [n // 8 for n in bits], "slow": slow})
    return found


def not_for_amd(*modules: str) -> list[str]:
    """Return the kernels that do not compile for gfx942. Of each kernel the first launch is tried,
    with as many stages as on Hopper or with one."""
    return [
        f"{module}.{configs[0].kernel.__name__}"
        for module in modules
        for configs in configs_of(module, "CONFIGS")
        if not any(
            compiles_for_amd(replace(configs[0], num_stages=stages))
            for stages in sorted({configs[0].num_stages, 1}, reverse=True)
        )
    ]


def compiles_for_amd(config: Config) -> bool:
    """Compile a launch in a process of its own, which an error within LLVM ends."""
    child = os.fork()
    if child == 0:
        status = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the compiler's report
        try:
            status = int("hsaco" not in compile_for(config, GPUTarget("hip", "gfx942", 64)).asm)
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


LISTS: dict[str, Any] = {
    "spills": partial(spills_and_late_reads, launches),
    "latents": partial(spills_and_late_reads, latent_launches),
    "rotating": partial(spills_and_late_reads, rotating_launches),
    "loads": loads_and_conversions,
    "amd": not_for_amd,
}


def main() -> None:
    if sys.argv[1] in LISTS:
        print(json.dumps(LISTS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("step", type=int)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--capability", type=int, default=ARCH)
    parser.add_argument("--list", default="CONFIGS")
    parser.add_argument("--lower", nargs="*", default=[])
    given = parser.parse_args()
    found, step = [], given.step
    for name in given.modules:
        for configs in configs_of(name, given.list):
            some = configs[::step] if len(configs) > step else configs
            found += [
                {"module": name} | compile_config(config, step == 1, given.capability)
                for config in some
            ]
    target = GPUTarget("cuda", given.capability, 32)
    lowered = [
        {"module": name, "ir": lower(configs[0], target)}
        for name in given.lower
        for configs in configs_of(name, given.list)
    ]
    print(json.dumps(found + lowered))


def configs_of(module: str, names: str) -> list[list[Config]]:
    """Return the launches that a module lists under a name, by kernel."""
    of_kernels: dict[Any, list[Config]] = {}
    for config in getattr(importlib.import_module(f"quire.ops.kernels.{module}"), names):
        of_kernels.setdefault(config.kernel, []).append(config)
    return list(of_kernels.values())


if __name__ == "__main__":
    main()

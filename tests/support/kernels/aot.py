"""Compiles kernels for sm_90 without a device: python -m tests.support.kernels.aot STEP MODULE ...

Prints JSON with one entry for each of the modules' CONFIGS. If a kernel has more than STEP of them,
each STEPth from the first gets one. An entry holds registers, spilled bytes, shared memory, and
whether the PTX has Hopper's matrix instructions. With STEP 1 it also checks the machine code, which
takes longer to read. It counts products that are fused with sums although the source forbids it. It
also counts conditional reads of a buffer that a loop's next loads write: Triton (3.6) lets these
loads begin first. A process of its own, since kernels that are interpreted cannot be compiled.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.ops.kernels.launch import Config

TARGET = GPUTarget("cuda", 90, 32)
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def compile_config(config: Config, reads_machine_code: bool) -> dict[str, Any]:
    """What the machine code takes."""
    names = config.kernel.arg_names
    pointers = [name for name, kind in config.signature.items() if kind.startswith("*")]
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *config.divisible)
    }
    signature = {
        name: "constexpr" if name in config.constants else config.signature[name] for name in names
    }
    constants = {(names.index(name),): value for name, value in config.constants.items()}
    source = ASTSource(config.kernel, signature, constants, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if is_ordered(config):
        options["enable_fp_fusion"] = False
    binary = triton.compile(source, target=TARGET, options=options)
    registers, stack = _resources(binary.asm["cubin"])
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
        "late_reads": late_reads(binary.asm["ttgir"]),
        "fused": binary.asm["ptx"].count("fma") if is_ordered(config) else None,
    }


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
    is_attention = config.kernel.__name__ == "_attention_kernel"
    return (is_attention and config.constants["CHUNK"] > 0) or "AT_ONCE" in config.constants


def _resources(cubin: bytes) -> tuple[int, int]:
    found = RESOURCES.search(_run("cuobjdump", "-res-usage", cubin))
    assert found is not None, "cuobjdump tells no resources"
    return int(found[1]), int(found[2])


def _has_wgmma(cubin: bytes) -> bool:
    """Of 16 bits, or of e4m3."""
    return re.search(r"\b[HQ]GMMA\b", _machine_code(cubin)) is not None


def _machine_code(cubin: bytes) -> str:
    return _run("nvdisasm", "-c", cubin)


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BIN / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    found, step = [], int(sys.argv[1])
    for name in sys.argv[2:]:
        of_kernels: dict[Any, list[Config]] = {}
        for config in importlib.import_module(f"quire.ops.kernels.{name}").CONFIGS:
            of_kernels.setdefault(config.kernel, []).append(config)
        for configs in of_kernels.values():
            some = configs[::step] if len(configs) > step else configs
            found += [{"module": name} | compile_config(config, step == 1) for config in some]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

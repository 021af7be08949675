"""Memory and speed of known devices, for commands such as `quire fit --device H100`. No torch."""

import re
from dataclasses import dataclass

from quire.base.errors import ConfigError

MIB = 1 << 20
CPU, GPU = "cpu", "cuda"

# Memory in MiB, as nvidia-smi and rocm-smi show it: the advertised size without the part that the
# device reserves.
GPUS = {
    "B200": 183_359,
    "H200": 143_771,
    "H100": 81_559,
    "H100-NVL": 95_830,
    "A100-80": 81_920,
    "A100-40": 40_960,
    "L40S": 46_068,
    "L4": 23_034,
    "A40": 46_068,
    "A10": 23_028,
    "A10G": 23_028,
    "T4": 15_360,
    "V100-32": 32_768,
    "V100-16": 16_384,
    "RTX-5090": 32_607,
    "RTX-4090": 24_564,
    "RTX-3090": 24_576,
    "RTX-A6000": 49_140,
    "MI300X": 196_592,
}


@dataclass(frozen=True)
class Speed:
    """Peak rates from data sheets, which no step reaches."""

    flops_16: float  # operations per second of dense products in 16 bits
    flops_8: float  # operations per second of dense products in 8 bits
    memory: float  # bytes per second of its memory
    host: float  # bytes per second to or from the host
    peers: float  # bytes per second to or from devices of its kind


def _speed(flops_16: float, flops_8: float, memory: float, host: float, peers: float) -> Speed:
    """Return a Speed from TFLOP/s and GB/s."""
    return Speed(flops_16 * 1e12, flops_8 * 1e12, memory * 1e9, host * 1e9, peers * 1e9)


SPEEDS = {
    "B200": _speed(2250, 4500, 8000, 64, 900),
    "H200": _speed(989, 1979, 4800, 64, 450),
    "H100": _speed(989, 1979, 3350, 64, 450),
    "H100-NVL": _speed(835, 1671, 3938, 64, 300),
    "A100-80": _speed(312, 624, 2039, 32, 300),
    "A100-40": _speed(312, 624, 1555, 32, 300),
    "L40S": _speed(362, 733, 864, 32, 32),
    "L4": _speed(121, 242, 300, 32, 32),
    "A40": _speed(150, 299, 696, 32, 56),
    "A10": _speed(125, 250, 600, 32, 32),
    "A10G": _speed(70, 140, 600, 32, 32),
    "T4": _speed(65, 130, 320, 16, 16),
    "V100-32": _speed(125, 125, 900, 16, 150),
    "V100-16": _speed(125, 125, 900, 16, 150),
    "RTX-5090": _speed(210, 419, 1792, 64, 64),
    "RTX-4090": _speed(165, 330, 1008, 32, 32),
    "RTX-3090": _speed(71, 142, 936, 32, 56),
    "RTX-A6000": _speed(155, 310, 768, 32, 56),
    "MI300X": _speed(1307, 2615, 5300, 64, 448),
}
ALIASES = {"H100-SXM": "H100", "H100-PCIe": "H100", "H100-80": "H100"}
MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct")
UNITS = {"gb": 10**9, "mb": 10**6, "gib": 1 << 30, "mib": 1 << 20, "g": 10**9}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|mb|mib|g)", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """A device to plan for."""

    name: str  # name to print
    kind: str  # cpu or cuda
    memory_bytes: int  # available memory of a CPU, total memory of a GPU


def find_gpu(name: str) -> Device:
    """Return a GPU by its name, or a GPU of a size such as 24GB. Raises ConfigError.

    Names ignore case, `-`, `_` and spaces."""
    size = SIZE.fullmatch(name.strip())
    if size is not None and float(size[1]) > 0:
        num_bytes = int(float(size[1]) * UNITS[size[2].lower()])
        return Device(f"a GPU of {name.strip()}", GPU, num_bytes)
    known = {_plain(each): each for each in GPUS} | {_plain(a): n for a, n in ALIASES.items()}
    found = known.get(_plain(name))
    if found is None:
        raise ConfigError(
            f"there is no device {name!r}; known are cpu (this machine), {', '.join(GPUS)}, and"
            " sizes such as 24GB."
        )
    return Device(found, GPU, GPUS[found] * MIB)


def _plain(name: str) -> str:
    letters = re.sub(r"[\s_-]+", "", name.lower())
    return MAKERS.sub("", letters).removesuffix("gb")

"""The memory of devices that people ask about: `quire fit --device H100`. No torch."""

import re
from dataclasses import dataclass

from quire.base.errors import ConfigError

MIB = 1 << 20
CPU, GPU = "cpu", "cuda"

# MiB, as the makers' tools show them (nvidia-smi, rocm-smi): the advertised size, less what the
# device keeps for itself.
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
ALIASES = {"H100-SXM": "H100", "H100-PCIe": "H100", "H100-80": "H100"}
MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct")
UNITS = {"gb": 10**9, "mb": 10**6, "gib": 1 << 30, "mib": 1 << 20, "g": 10**9}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|mb|mib|g)", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """name: for people. kind: its type, cpu or cuda. memory_bytes: what is available of a CPU's,
    all of a GPU's."""

    name: str
    kind: str
    memory_bytes: int


def find_gpu(name: str) -> Device:
    """Return the GPU of this name, in any case, with `-`, `_`, spaces or without; or one of a size
    such as 24GB. Raises ConfigError, which lists the known ones."""
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

"""A package `vllm` with names only, which lets TRL create its client.

TRL refuses to make the client unless a supported version of vLLM is installed, but generates over
HTTP without it.
"""

from pathlib import Path

VERSION = "0.31.0"
ANY_NAME = f"__version__ = {VERSION!r}\ndef __getattr__(name):\n    return object\n"
FOLDERS = (
    "utils",
    "distributed",
    "distributed/weight_transfer",
    "distributed/device_communicators",
)
MODULES = (
    "sampling_params", "utils/network_utils", "distributed/utils",
    "distributed/weight_transfer/nccl_common", "distributed/weight_transfer/packed_tensor",
    "distributed/device_communicators/pynccl",
)  # fmt: skip


def write_stand_in(folder: Path) -> None:
    """Write the package and its metadata into a folder for `sys.path`."""
    package, facts = folder / "vllm", folder / f"vllm-{VERSION}.dist-info"
    for each in (package, *(package / name for name in FOLDERS)):
        each.mkdir()
        (each / "__init__.py").write_text(ANY_NAME)
    for name in MODULES:
        (package / f"{name}.py").write_text(ANY_NAME)
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    (facts / "RECORD").write_text("")

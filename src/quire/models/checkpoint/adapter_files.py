"""The files of an adapter: what they change, checked from their headers. No torch.

    adapter_config.json          scales (spec/adapter_config.py)
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight [R, K]
                                 base_model.model.NAME.lora_B.weight [N, R]

NAME is a module of the base model; R is its rank. The digest of both files identifies the
adapter: cached blocks of one digest are never used for another. Pickled weights are not read.

Shape legend: R rank, K inputs, N outputs.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ModelError
from quire.models.checkpoint.files import listed, safetensors_headers
from quire.spec.adapter_config import CONFIG, MAX_RANK, AdapterConfig, read_adapter_config

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MAX_WEIGHT_BYTES = 16 << 30
MAX_TENSORS = 200_000
READ_BYTES = 1 << 22
DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class AdaptedModule:
    """A module of the base model that an adapter changes, by x -> scale * B A x.

    down, up: names of A [R, K] and B [N, R] in the file."""

    name: str
    rank: int
    inputs: int
    outputs: int
    scale: float
    down: str
    up: str


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's modules. weights: the file that holds them."""

    weights: Path
    modules: tuple[AdaptedModule, ...]

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)


def read_adapter(directory: Path, max_rank: int = MAX_RANK) -> AdapterFiles:
    """Read what an adapter changes. Raises ModelError if its files are invalid or have a tensor
    that quire does not support, or if a rank is above max_rank."""
    config, path = read_adapter_config(directory), directory / WEIGHTS
    _check_size(directory)
    headers = safetensors_headers([path])
    if len(headers) > MAX_TENSORS:
        raise ModelError(f"{path} has {len(headers):,} tensors; the limit is {MAX_TENSORS:,}.")
    others = [name for name in headers if not name.endswith((DOWN, UP))]
    if others:
        raise ModelError(
            f"{path} has tensors that are no lora_A or lora_B of a linear layer:"
            f" {listed(others, 3)}. Biases, embeddings, heads and magnitudes (DoRA) are not"
            " supported; merge the adapter into the model."
        )
    for name, header in headers.items():
        if header.dtype not in DTYPES or len(header.shape) != 2 or 0 in header.shape:
            raise ModelError(
                f"{path}: {name} must be a matrix of {', '.join(DTYPES)}, got {header.dtype}"
                f" {list(header.shape)}."
            )
    shapes = {name: header.shape for name, header in headers.items()}
    modules = tuple(_modules(shapes, config, path, max_rank))
    if not modules:
        raise ModelError(f"{path} has no tensors, so the adapter changes nothing.")
    return AdapterFiles(path, modules)


def adapter_digest(directory: Path) -> str:
    """Return the digest of an adapter's files, which identifies it. Raises ModelError if a file is
    missing, too large or unreadable."""
    _check_size(directory)
    digest = hashlib.sha256()
    try:
        for name in (CONFIG, WEIGHTS):
            digest.update((directory / name).stat().st_size.to_bytes(8, "little"))
            with (directory / name).open("rb") as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
    except OSError as error:
        raise ModelError(f"{directory} is no readable adapter: {error}.") from error
    return digest.hexdigest()


def _check_size(directory: Path) -> None:
    path = directory / WEIGHTS
    if not path.is_file():
        pickled = sorted(file.name for file in directory.glob("adapter_model.*"))
        others = f"; {listed(pickled)} is not read, convert it to safetensors" if pickled else ""
        raise ModelError(f"{directory} has no {WEIGHTS}{others}.")
    size = path.stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise ModelError(f"{path} has {size:,} bytes; the limit is {MAX_WEIGHT_BYTES:,}.")


def _modules(
    shapes: dict[str, tuple[int, ...]], config: AdapterConfig, path: Path, max_rank: int
) -> Iterator[AdaptedModule]:
    for down, (rank, inputs) in shapes.items():
        if not down.endswith(DOWN):
            continue
        up = down.removesuffix(DOWN) + UP
        outputs, up_rank = shapes.get(up, (0, 0))
        if up_rank != rank:
            raise ModelError(
                f"{path}: {down} has rank {rank}, but {up} has shape [{outputs}, {up_rank}];"
                " the file is damaged or incomplete."
            )
        if rank > max_rank:
            raise ModelError(
                f"{path}: {down} has rank {rank}, above max_lora_rank={max_rank}; raise"
                f" max_lora_rank (at most {MAX_RANK})."
            )
        name = down.removesuffix(DOWN).removeprefix(PREFIX)
        yield AdaptedModule(name, rank, inputs, outputs, config.scale_of(name, rank), down, up)
    lone = [
        name for name in shapes if name.endswith(UP) and name.removesuffix(UP) + DOWN not in shapes
    ]
    if lone:
        raise ModelError(f"{path} lacks the lora_A of {listed(lone, 3)}.")

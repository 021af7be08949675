"""The files of an adapter: what they change, checked from their headers. No torch.

A directory that PEFT wrote:

    adapter_config.json          scales (spec/adapter_config.py)
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight [R, K]
                                 base_model.model.NAME.lora_B.weight [N, R]

For tensors that hold all experts of a mixture, see `load/expert_adapters.py`.

or a GGUF file of llama.cpp, with the scales in its metadata:

    blk.0.attn_q.weight.lora_a [R, K], blk.0.attn_q.weight.lora_b [N, R]

NAME is a module of the base model; R is its rank. The digest of all files identifies the
adapter: cached blocks of one digest are never used for another. Pickled weights are not read.

Shape legend: R rank, K inputs, N outputs.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import ModelError
from quire.models.checkpoint.files import listed, safetensors_headers
from quire.spec.adapter_config import CONFIG, MAX_RANK, AdapterConfig, read_adapter_config
from quire.spec.gguf.adapter import DOWN_GGUF, UP_GGUF, read_gguf_adapter
from quire.spec.gguf.container import is_gguf

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MAX_WEIGHT_BYTES = 16 << 30
MAX_TENSORS = 200_000
READ_BYTES = 1 << 22
DTYPES = ("F64", "F32", "F16", "BF16")
# PEFT wraps a module once for each of its parameters, so all but the last are of a `base_layer`.
EXPERTS = re.compile(r"((?:^|\.)experts)(?:\.base_layer)*$")


@dataclass(frozen=True)
class AdaptedModule:
    """A module of the base model that an adapter changes, by x -> scale * B A x.

    down, up: names of A [R, K] and B [N, R] in the file. num_experts: of a tensor that holds all
    experts of a mixture (`load/expert_adapters.py`), each with this rank; 0 for other modules."""

    name: str
    rank: int
    inputs: int
    outputs: int
    scale: float
    down: str
    up: str
    num_experts: int = 0


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's modules. weights: the file that holds them. is_gguf: whether it is a GGUF file,
    whose modules have llama.cpp's names and order of rows."""

    weights: Path
    modules: tuple[AdaptedModule, ...]
    is_gguf: bool = False

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)


def read_adapter(path: Path, max_rank: int = MAX_RANK) -> AdapterFiles:
    """Read what an adapter changes. path: a directory, or a GGUF file. Raises ModelError if its
    files are invalid or have a tensor that quire does not support, or if a rank is above
    max_rank."""
    files = _read_gguf(path) if path.is_file() else _read_directory(path)
    if not files.modules:
        raise ModelError(f"{files.weights} has no tensors, so the adapter changes nothing.")
    for module in files.modules:
        if module.rank > max_rank:
            raise ModelError(
                f"{files.weights}: {module.down} has rank {module.rank}, above"
                f" max_lora_rank={max_rank}; raise max_lora_rank (at most {MAX_RANK})."
            )
    return files


def _read_directory(directory: Path) -> AdapterFiles:
    config, path = read_adapter_config(directory), directory / WEIGHTS
    _check_size(directory)
    headers = safetensors_headers([path])
    shapes = {name: header.shape for name, header in headers.items()}
    _check_names(shapes, (DOWN, UP), path)
    for name, header in headers.items():
        if header.dtype not in DTYPES or len(header.shape) != 2 or 0 in header.shape:
            raise ModelError(
                f"{path}: {name} must be a matrix of {', '.join(DTYPES)}, got {header.dtype}"
                f" {list(header.shape)}."
            )
    modules = tuple(_modules(shapes, (DOWN, UP), config, path))
    return AdapterFiles(path, modules)


def _read_gguf(path: Path) -> AdapterFiles:
    if not is_gguf(path):
        raise ModelError(f"{path} is neither a directory that PEFT wrote nor a GGUF file.")
    shapes, config = read_gguf_adapter(path)
    _check_names(shapes, (DOWN_GGUF, UP_GGUF), path)
    for name, shape in shapes.items():
        if len(shape) != 2:
            raise ModelError(
                f"{path}: {name} must be a matrix, got {list(shape)}. Experts need PEFT's format."
            )
    modules = tuple(_modules(shapes, (DOWN_GGUF, UP_GGUF), config, path))
    return AdapterFiles(path, modules, is_gguf=True)


def _check_names(names: Mapping[str, object], ends: tuple[str, str], path: Path) -> None:
    if len(names) > MAX_TENSORS:
        raise ModelError(f"{path} has {len(names):,} tensors; the limit is {MAX_TENSORS:,}.")
    if others := [name for name in names if not name.endswith(ends)]:
        raise ModelError(
            f"{path} has tensors that are no lora_A or lora_B of a linear layer:"
            f" {listed(others, 3)}. Biases, embeddings, heads and magnitudes (DoRA) are not"
            " supported; merge the adapter into the model."
        )


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of an adapter; they may be missing."""
    return (path,) if path.is_file() else (path / CONFIG, path / WEIGHTS)


def adapter_digest(path: Path) -> str:
    """Return the digest of an adapter's files, which identifies it. Raises ModelError if a file is
    missing, too large or unreadable."""
    _check_size(path)
    digest = hashlib.sha256()
    try:
        for each in files_of(path):
            digest.update(each.stat().st_size.to_bytes(8, "little"))
            with each.open("rb") as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
    except OSError as error:
        raise ModelError(f"{path} is no readable adapter: {error}.") from error
    return digest.hexdigest()


def _check_size(directory: Path) -> None:
    path = directory if directory.is_file() else directory / WEIGHTS
    if not path.is_file():
        pickled = sorted(file.name for file in directory.glob("adapter_model.*"))
        others = f"; {listed(pickled)} is not read, convert it to safetensors" if pickled else ""
        raise ModelError(f"{directory} has no {WEIGHTS}{others}.")
    size = path.stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise ModelError(f"{path} has {size:,} bytes; the limit is {MAX_WEIGHT_BYTES:,}.")


def _modules(
    shapes: Mapping[str, tuple[int, ...]], ends: tuple[str, str], config: AdapterConfig, path: Path
) -> Iterator[AdaptedModule]:
    first, second = ends
    for down, (rank, inputs) in shapes.items():
        if not down.endswith(first):
            continue
        up = down.removesuffix(first) + second
        outputs, up_rank = shapes.get(up, (0, 0))
        if up_rank != rank:
            raise ModelError(
                f"{path}: {down} has rank {rank}, but {up} has shape [{outputs}, {up_rank}];"
                " the file is damaged or incomplete."
            )
        name, num_experts = down.removesuffix(first).removeprefix(PREFIX), 0
        if config.has_parameters and EXPERTS.search(name):
            name, num_experts = EXPERTS.sub(r"\1", name), rank // config.rank
            rank = _rank_of_one(down, rank, config.rank, path)
        scale = config.scale_of(name, rank)
        yield AdaptedModule(name, rank, inputs, outputs, scale, down, up, num_experts)
    alone = [
        name
        for name in shapes
        if name.endswith(second) and name.removesuffix(second) + first not in shapes
    ]
    if alone:
        raise ModelError(f"{path} lacks the lora_A of {listed(alone, 3)}.")


def _rank_of_one(name: str, ranks: int, rank: int, path: Path) -> int:
    """Return the rank of one expert. ranks: of all experts together."""
    if ranks % rank:
        raise ModelError(
            f"{path}: {name} has {ranks} rows, which is no multiple of r={rank}; the experts of"
            " target_parameters must all have this rank."
        )
    return rank

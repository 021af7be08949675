"""File of a start: all that a later start needs in order to run without torch.

    index: {key, weights, weights_bytes, copy_bytes_per_s, variant, hidden_size, heads, layers,
            model, head}
    data: tensors that the programs read and the file of packed weights does not hold

weights is the key of the file of packed weights, or null. heads are pairs of a cache group and its
query heads of a KV head, in a step's order of groups. layers are LayerPlaces, in the program's
order. model and head are ProgramParts. A tensor's location is a pair: 0 for the file of weights or
1 for this file, and an offset in its data.

A file's name is a digest of all that its contents depend on. These are the checkpoint's files, the
settings of the model, the instruction sets, and quire's own files.
"""

import functools
import hashlib
import json
import logging
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from quire.base.errors import ModelError
from quire.base.settings.config import EngineConfig
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.source import ModelSource, load_format_of
from quire.models.load.cache_files import (
    STARTS,
    UNUSABLE,
    WEIGHTS,
    Bytes,
    WeightCache,
    file_identity,
    in_use,
    read_contents,
    write_contents,
)
from quire.ops.host.native import needed_core
from quire.ops.trace.program_parts import ProgramParts
from quire.ops.weights.formats import FORMATS, chosen_variants
from quire.runner.warm.blocks import LayerPosition
from quire.spec.gguf.container import is_gguf

logger = logging.getLogger("quire")

VERSION = 1
IN_WEIGHTS, IN_START = 0, 1
MAX_BYTES = 256 << 20  # of data; a larger start is not saved


@dataclass(frozen=True)
class Start:
    """Contents of the file; see the module. data: bytes of the file of weights and of this file,
    mapped read-only."""

    weights: str | None
    weights_bytes: int
    copy_bytes_per_s: float
    variant: int
    hidden_size: int
    heads: tuple[tuple[int, int], ...]
    layers: tuple[LayerPosition, ...]
    model: ProgramParts
    head: ProgramParts
    data: tuple[Bytes, Bytes]


def start_path(cache: WeightCache, config: EngineConfig, source: ModelSource) -> Path | None:
    """Return the file of the start of a model with these settings; None if it must not be saved."""
    if load_format_of(config, source) == "dummy":
        return None
    model_path = source.directory
    try:
        files = checkpoint_files(model_path)
    except ModelError:  # a start with torch reads the config first and reports the error
        return None
    if not is_gguf(model_path):
        files += sorted(each for each in model_path.glob("*.json") if each.name != "tokenizer.json")
    facts = [
        VERSION,
        asdict(config.model),
        [config.cache.kv_cache_dtype, config.cache.block_size, config.attention_backend],
        sorted(chosen_variants(FORMATS).items()),
        _own_files(),
        [file_identity(file) for file in files],
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]
    return cache.directory / f"{key}{STARTS}"


@functools.cache
def _own_files() -> tuple[tuple[str, int, int], ...]:
    """Return path, size and modification time of quire's files. A process runs one version."""
    package = str(Path(__file__).parents[2])
    folders, found = [package], list[tuple[str, int, int]]()
    for folder in folders:
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            if entry.name.endswith(".py"):
                facts = entry.stat()
                found.append((entry.path[len(package) :], facts.st_size, facts.st_mtime_ns))
            elif entry.is_dir() and not entry.name.startswith("_"):
                folders.append(entry.path)
    facts = os.stat(needed_core().__file__)
    return (*found, ("core", facts.st_size, facts.st_mtime_ns))


def read_start(path: Path) -> Start | None:
    """Read a saved start; None if there is none, or if it is invalid."""
    try:
        with in_use(path) as file:
            contents = read_contents(file, path.stem)
        index = contents.index
        own = weights = _bytes(contents.mapped, contents.start)
        if index["weights"] is not None:
            with in_use(path.parent / f"{index['weights']}{WEIGHTS}") as file:
                weights_file = read_contents(file, index["weights"])
            weights = _bytes(weights_file.mapped, weights_file.start)
        return Start(
            index["weights"],
            index["weights_bytes"],
            index["copy_bytes_per_s"],
            index["variant"],
            index["hidden_size"],
            tuple((group, heads) for group, heads in index["heads"]),
            tuple(LayerPosition(*each) for each in index["layers"]),
            ProgramParts(**index["model"]),
            ProgramParts(**index["head"]),
            (weights, own),
        )
    except FileNotFoundError:
        return None
    except UNUSABLE as error:
        logger.warning("%s is not used: %s", path, error)
        return None


def write_start(path: Path, start: Start, pieces: list[tuple[int, Bytes]]) -> None:
    """Save a start with these pieces of data."""
    if sum(len(piece) for _, piece in pieces) > MAX_BYTES:
        return
    index = {name: value for name, value in vars(start).items() if name != "data"}
    index |= {"key": path.stem, "model": asdict(start.model), "head": asdict(start.head)}
    write_contents(path, index, pieces, "start")


def _bytes(mapped: mmap.mmap, start: int) -> Bytes:
    return np.frombuffer(mapped, np.uint8)[start:]

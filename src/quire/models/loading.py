"""Fills a model's parameters: from safetensors or GGUF files, or with seeded random numbers.

Files are mapped into memory and copied tensor by tensor to where they belong, so there is never a
second copy of the model. Formats that can run code are not read.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quire.base.errors import ModelError
from quire.base.gguf import GGUFFile, is_gguf
from quire.base.model_spec import ModelSpec
from quire.models.gguf.weights import gguf_tensors
from quire.models.layers import HeadNorm, Layer, LayerNorm, RMSNorm, Source
from quire.models.packing import AS_THEY_ARE, WeightFormats, model_bytes, pack_model
from quire.models.registry import make_model

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

INDEX = "model.safetensors.index.json"


def load_model(
    directory: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    quantization: WeightFormats = AS_THEY_ARE,
) -> nn.Module:
    """The model on the device, ready to run.

    load_format: `auto` and `safetensors` read DIRECTORY's *.safetensors, or the GGUF file that
    stands in its place; `dummy` reads nothing.
    Raises ModelError for an unknown architecture and for tensors that are missing, unknown or of
    another shape than the config says.
    """
    model = make_model(spec, dtype, device)
    report = progress or _no_progress
    if load_format == "dummy":
        fill_with_random(model, seed, report)
    elif is_gguf(directory):
        fill_from_gguf(model, directory, spec, report)
    else:
        fill_from_files(model, weight_files(directory), report)
    pack_model(model, quantization)
    return model


def weight_files(directory: Path) -> list[Path]:
    """The *.safetensors files of a model. Raises ModelError, saying what to do, if it has none."""
    index, single = directory / INDEX, directory / "model.safetensors"
    if index.exists():
        files = _indexed_files(index)
    else:
        files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(_no_weights(directory))
    return files


def _indexed_files(index: Path) -> list[Path]:
    """The files that an index names; they must stand beside it."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / name for name in names if Path(name).name == name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a valid index of weight files: {error!r}.") from error
    if len(files) < len(names):
        raise ModelError(f"{index} is an index of files that are not beside it: {_listed(names)}.")
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {_listed(missing)}, which its index names. Download it again."
        )
    return files


def fill_from_files(model: nn.Module, files: Iterable[Path], report: Progress) -> None:
    """Copy each tensor of the files to the parameters that it fills."""
    files = list(files)
    sources = _sources_by_name(model)
    total, done = sum(file.stat().st_size for file in files), 0
    filled: set[str] = set()
    unknown: list[str] = []
    for name, tensor in _tensors(files):
        source = sources.get(name) or sources.get(f"{model.base_prefix}{name}")
        if source is None:
            unknown += [] if _is_ignored(model, name) else [name]
        else:
            _fill(source, tensor, name)
            filled.add(source.name)
        done += tensor.nbytes
        report(min(done, total), total)
    _check_complete(filled, sources, unknown)
    report(total, total)


def fill_from_gguf(model: nn.Module, path: Path, spec: ModelSpec, report: Progress) -> None:
    """Dequantise each tensor of a GGUF file into the parameters that it fills."""
    file, sources = GGUFFile(path), _sources_by_name(model)
    total, done = sum(place.num_bytes for place in file.tensors.values()), 0
    filled: set[str] = set()
    unknown: list[str] = []
    for tensor in gguf_tensors(file, spec):
        source = sources.get(tensor.name)
        if source is None:
            unknown.append(tensor.name)
        else:
            tensor.fill(source)
            filled.add(source.name)
        done += tensor.num_bytes
        report(done, total)
    _check_complete(filled, sources, unknown)
    report(total, total)


def fill_with_random(model: nn.Module, seed: int, report: Progress) -> None:
    """Small random numbers, the same for the same seed, and ones for the weights of norms."""
    numbers = _RandomNumbers(seed)
    total, done = model_bytes(model), 0
    filled: set[int] = set()
    for module in model.modules():
        is_norm = isinstance(module, RMSNorm | HeadNorm | LayerNorm)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in filled:
                continue
            filled.add(id(parameter))
            if is_norm:
                parameter.fill_(1.0 if name == "weight" else 0.0)
            else:
                numbers.fill(parameter, start=len(filled) * 7919)
            done += parameter.nbytes
            report(done, total)


class _RandomNumbers:
    """One stretch of normal numbers, that large parameters repeat: drawing all of them is slow."""

    LENGTH = 1 << 20

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        stretch = torch.empty(self.LENGTH).normal_(0.0, 0.02, generator=generator)
        self._twice = torch.cat((stretch, stretch))

    def fill(self, parameter: torch.Tensor, start: int) -> None:
        """Fill the parameter from the stretch, beginning at element `start` of it."""
        self._twice = self._twice.to(parameter.device, parameter.dtype)
        start %= self.LENGTH
        stretch = self._twice[start : start + self.LENGTH]
        flat = parameter.view(-1)
        whole = flat.numel() // self.LENGTH * self.LENGTH
        flat[:whole].view(-1, self.LENGTH).copy_(stretch)
        flat[whole:].copy_(stretch[: flat.numel() - whole])


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the files, one at a time, backed by the mapped file."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}. Download it again.") from error


def _sources_by_name(model: nn.Module) -> dict[str, Source]:
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    return {source.name: source for layer in layers for source in layer.sources()}


def _fill(source: Source, tensor: torch.Tensor, name: str) -> None:
    wanted, got = source.checkpoint_shape, tuple(tensor.shape)
    if got != wanted:
        raise ModelError(
            f"the tensor {name} has the shape {list(got)}, but config.json asks for {list(wanted)}:"
            " the config and the weights are not of one model."
        )
    source.fill(tensor)


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Whether a tensor without a place is harmless: a constant, or a tied head stored again."""
    tied_head = name == "lm_head.weight" and not model.head.sources()
    return tied_head or name.endswith(model.ignored_tensors)


def _check_complete(filled: set[str], sources: dict[str, Source], unknown: list[str]) -> None:
    missing = sorted(sources.keys() - filled)
    problems = []
    if missing:
        problems.append(f"lack {_listed(missing)}")
    if unknown:
        problems.append(f"hold unknown tensors ({_listed(unknown)})")
    if problems:
        raise ModelError(
            f"the weight files {' and '.join(problems)}. They do not match the model's config:"
            " check that both are of the same model and that its download is complete."
        )


def _no_weights(directory: Path) -> str:
    others = [f.name for f in sorted(directory.glob("*")) if f.suffix in (".bin", ".pt", ".pth")]
    if others:
        return (
            f"{directory} has its weights only as {_listed(others)}. Only safetensors files are"
            " read: convert them, for example with transformers' save_pretrained()."
        )
    return (
        f"{directory} has no *.safetensors files, so there are no weights to load. Download them,"
        " or use load_format='dummy' for random weights."
    )


def _listed(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _no_progress(done: int, total: int) -> None:
    pass

"""Fill a model's parameters from safetensors or GGUF files, or with seeded random numbers.

Files are mapped into memory, and each tensor is copied to its parameters. Each layer is packed when
it is complete (assembly.py), so the model never exists twice in memory. Weights that are packed
straight from the file are read instead (ops/weights/mapped_tensors.py). Packed weights may come
from a cache (weight_cache.py). Formats that can run code are not read.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quire.base.errors import ModelError, OutOfMemory
from quire.models.checkpoint.files import checkpoint_files, tensor_ranges, weight_files
from quire.models.checkpoint.formats import AS_THEY_ARE, StoredFormat, WeightFormats
from quire.models.checkpoint.rank_place import WHOLE, RankPlace
from quire.models.checkpoint.sources import ALL, Stretches
from quire.models.gguf.stored import kinds_by_name
from quire.models.gguf.weights import gguf_tensors, stored_formats
from quire.models.load.assembly import Assembly, empty_model
from quire.models.load.cache_files import WeightCache
from quire.models.load.contents import Contents, check_complete, tensor_names
from quire.models.load.packing import Stored, model_bytes, planned_bytes
from quire.models.load.patches import hidden_names
from quire.models.load.weight_cache import entry_of
from quire.models.model import Model
from quire.models.parts.layers import Layer
from quire.models.quantised.layers import quantised_layers
from quire.ops.gpu import is_gpu
from quire.ops.host.host_memory import forget_pages
from quire.ops.host.torch_import import new_generator
from quire.ops.weights.device_weights import check_rows, dtype_name
from quire.ops.weights.formats import chosen_variants
from quire.ops.weights.mapped_tensors import FilePosition, MappedTensors
from quire.ops.weights.pack import can_pack_natively
from quire.spec.cuts import all_of
from quire.spec.gguf.container import GGUFFile, is_gguf
from quire.spec.model_spec import PART_OF, ModelSpec

logger = logging.getLogger("quire")

Progress = Callable[[int, int], None]  # (bytes loaded, total bytes)
MIB = 1 << 20


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a model.

    load_format: `auto` and `safetensors` read *.safetensors in the directory, or the GGUF file in
    its place. `dummy` reads no files, and uses random numbers of this seed. formats: by default,
    weights that a GGUF file quantises keep its format (gguf/stored.py) if the core multiplies it.
    cache: cache of packed weights, if any. max_bytes: limit of all weights; None for no limit.
    place: position of the rank whose part of the model is loaded. check_bytes: called with the
    bytes of the packed weights before any is read; it may raise OutOfMemory. patch: file of tensors
    that replace the checkpoint's of the same names (patches.py).
    """

    load_format: str = "auto"
    seed: int = 0
    formats: WeightFormats = AS_THEY_ARE
    cache: WeightCache | None = None
    max_bytes: int | None = None
    place: RankPlace = WHOLE
    check_bytes: Callable[[int], object] | None = None
    patch: Path | None = None


def load_model(
    directory: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load the model, or a rank's part of it, to the device. spec: spec of the whole model.

    Raises ModelError for an unknown architecture, and for tensors that are missing, unknown,
    duplicated or of a wrong shape. Raises OutOfMemory before loading if the weights do not fit.
    """
    options = options or LoadOptions()
    formats, cache, reads = options.formats, options.cache, options.load_format != "dummy"
    model = empty_model(spec, dtype, device, options.place)
    if PART_OF in spec.raw and model.vision is None:
        logger.warning(
            "models of type %s also read images; only the text part is served, without images",
            spec.raw[PART_OF],
        )
    report = progress or _no_progress
    files, patch = checkpoint_files(directory) if reads else [], options.patch
    files += [] if patch is None else [patch]
    stored: Stored = {}
    if reads:
        model.adopt(_names(directory, spec, files))
        stored = formats_of_file(directory, spec, model, dtype, device, formats)
    entry, num_bytes = None, planned_bytes(model, dtype, device, formats, stored)
    _check_room(num_bytes, options.max_bytes)
    if options.check_bytes is not None:
        options.check_bytes(num_bytes)
    if cache is not None and can_pack_natively(dtype, device):
        part = options.place.numbers
        made_with = (spec.identity, dtype, formats, _kernels(dtype, formats, stored), part)
        entry = entry_of(cache, model, num_bytes, files, options.seed, made_with)
        if entry is not None and entry.restore(model):
            model.weights_key = entry.key
            report(num_bytes, num_bytes)
            return model
    mapped = MappedTensors() if reads and not is_gguf(directory) else None
    assembly = Assembly(model, device, formats, stored, mapped)
    if mapped is not None:
        fill_from_files(assembly, files, mapped, report, patch)
    elif reads:
        fill_from_gguf(assembly, directory, spec, report)
    else:
        fill_with_random(assembly, options.seed, report)
    model = assembly.finish()
    if entry is not None and entry.store(model):
        model.weights_key = entry.key
    return model


def _names(directory: Path, spec: ModelSpec, files: list[Path]) -> Iterable[str]:
    """Return the names of all tensors; for a GGUF file, their names in quire's layers."""
    if is_gguf(directory):
        return kinds_by_name(GGUFFile(directory), spec)
    return tensor_names(files)


def _kernels(dtype: torch.dtype, formats: WeightFormats, stored: Stored) -> dict[str, str]:
    """Return the instruction set of each format that weights are packed in."""
    requested = [each for each in (formats.layers, formats.head) if each is not None]
    used = {each.format for each in requested}
    for each in stored.values():
        if isinstance(each, StoredFormat):
            used |= {format.format for format in each.formats}
        elif each.stays_quantised:
            used |= {format.format for _, format in each.stretches() if format is not None}
    return chosen_variants(sorted({dtype_name(dtype)} | used))


def formats_of_file(
    path: Path,
    spec: ModelSpec,
    model: Model,
    dtype: torch.dtype,
    device: torch.device,
    quantization: WeightFormats,
) -> Stored:
    """Return the packed format of each layer whose weights the checkpoint holds quantised.

    The result is empty for a GGUF file that is dequantised. Weights of other checkpoints keep their
    format, unless the settings request a format or the dtype is float64, which serves as a
    reference. Then they are dequantised.
    """
    as_stored = quantization == AS_THEY_ARE
    if is_gguf(path):
        is_packed = as_stored and can_pack_natively(dtype, device)
        return stored_formats(GGUFFile(path), spec, model) if is_packed else {}
    config = spec.quantization
    if config is None:
        return {}
    stays_quantised = as_stored and dtype != torch.float64
    contents = _contents(weight_files(path), model)
    found = quantised_layers(
        model, config, contents.headers, stays_quantised=stays_quantised, is_gpu=is_gpu(device)
    )
    if found and quantization.is_quantised:
        logger.warning(
            "%s holds weights quantised by %s, which --quantization rounds a second time; remove"
            " it to keep them unchanged", path, config.method,
        )  # fmt: skip
    if found and stays_quantised:
        check_rows(f"{config.method} weights", dtype, device)
    return found


def _contents(files: list[Path], model: Model) -> Contents:
    model.adopt(tensor_names(files))
    return Contents(files, model)


def check_files(files: Iterable[Path], spec: ModelSpec, place: RankPlace = WHOLE) -> None:
    """Raise ModelError if a checkpoint's tensors do not match the config, and ConfigError if a rank
    cannot hold a part of them."""
    model = empty_model(spec, torch.bfloat16, torch.device("cpu"), place)
    contents, config = _contents(list(files), model), spec.quantization
    stored: Stored = {}
    if config is not None:
        stored = quantised_layers(model, config, contents.headers, stays_quantised=True)
    contents.check(stored)


def fill_from_files(
    assembly: Assembly,
    files: Iterable[Path],
    mapped: MappedTensors,
    report: Progress,
    patch: Path | None = None,
) -> None:
    """Copy each tensor of the files to the parameters that it fills. mapped: the same object that
    the assembly has. patch: see LoadOptions; one of the files."""
    files, model = list(files), assembly.model
    Contents(files, model, patch).check(assembly.stored)
    total, done = sum(file.stat().st_size for file in files), 0
    for name, tensor in _tensors(files, mapped, patch):
        any(assembly.put(each, tensor) for each in model.names_of(name))
        forget_pages(tensor)
        done += tensor.nbytes
        report(min(done - assembly.waiting_bytes, total), total)
    report(total, total)


def fill_from_gguf(assembly: Assembly, path: Path, spec: ModelSpec, report: Progress) -> None:
    """Copy or dequantise each tensor of a GGUF file to the parameters that it fills."""
    file = GGUFFile(path)
    total, done = sum(place.num_bytes for place in file.tensors.values()), 0
    unknown: list[str] = []
    for tensor in gguf_tensors(file, spec):
        is_known = assembly.fill(tensor.name, tensor.fill)
        if not is_known and not assembly.model.is_elsewhere(tensor.name):
            unknown.append(tensor.name)
        done += tensor.num_bytes
        report(done, total)
    check_complete(assembly.missing, unknown)
    report(total, total)


def fill_with_random(assembly: Assembly, seed: int, report: Progress) -> None:
    """Fill parameters with neutral values (such as ones for norms), or else with small random
    numbers. These depend on the seed and the tensor's name, so ranks and stages get parts of a
    single process's numbers. Whole experts on GPUs are an exception: they share a parameter."""
    numbers = _RandomNumbers(seed)
    total, done = model_bytes(assembly.model), 0
    prefixes = {module: prefix for prefix, module in assembly.model.named_modules()}

    def fill(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal done
        if isinstance(module, Layer) and name in module.neutral:
            parameter.fill_(module.neutral[name])
        else:
            part = module.stretches(name) if isinstance(module, Layer) else ALL
            tensor = _first_tensor(module, parameter) or f"{prefixes[module]}.{name}"
            numbers.fill(parameter, int.from_bytes(sha256(tensor.encode()).digest()[:8]), part)
        if isinstance(module, Layer) and name.endswith("bias"):
            _clear_elsewhere(module)
        done += parameter.nbytes
        report(done, total)

    assembly.fill_all(fill)


def _first_tensor(module: nn.Module, parameter: nn.Parameter) -> str | None:
    """Return the name of the first checkpoint tensor that fills a parameter; None without one. The
    name is equal on all ranks and stages."""
    if not isinstance(module, Layer):
        return None
    place = parameter.untyped_storage().data_ptr()
    return next(
        (
            source.name
            for source in module.sources()
            if source.destination.untyped_storage().data_ptr() == place
        ),
        None,
    )


def _clear_elsewhere(layer: Layer) -> None:
    """Set the values that another rank adds to zero on this rank."""
    for source in layer.sources():
        if source.is_elsewhere:
            source.destination.zero_()


class _RandomNumbers:
    """A sequence of normal numbers that large parameters repeat, because drawing all is slow."""

    LENGTH = 1 << 20

    def __init__(self, seed: int) -> None:
        generator = new_generator(seed)
        stretch = torch.empty(self.LENGTH).normal_(0.0, 0.02, generator=generator)
        self._twice = torch.cat((stretch, stretch))

    def fill(self, parameter: torch.Tensor, start: int, part: Stretches = ALL) -> None:
        """Fill a parameter of any shape from the sequence. start: where the sequence begins for the
        whole parameter, in elements. part: this rank's part of the whole parameter."""
        self._twice = self._twice.to(parameter.device, parameter.dtype)
        if part.is_all:
            return self._fill(parameter, start)
        num_rows = sum(cut.count for cut in part.cuts)
        columns = part.columns or all_of(parameter.numel() // num_rows)
        rows = parameter.view(-1, columns.count)
        for cut in part.cuts:
            begin, own = start + cut.first * columns.whole + columns.first, rows[: cut.count]
            if columns.is_whole:
                self._fill(own, begin)
            else:
                for row in own:
                    self._fill(row, begin)
                    begin += columns.whole
            rows, start = rows[cut.count :], start + cut.whole * columns.whole

    def _fill(self, parameter: torch.Tensor, start: int) -> None:
        start %= self.LENGTH
        stretch = self._twice[start : start + self.LENGTH]
        flat = parameter.view(-1)
        whole = flat.numel() // self.LENGTH * self.LENGTH
        flat[:whole].view(-1, self.LENGTH).copy_(stretch)
        flat[whole:].copy_(stretch[: flat.numel() - whole])


def _tensors(
    files: Iterable[Path], mapped: MappedTensors, patch: Path | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of the files, one at a time, backed by the mapped file. The files stay open
    until the end, because a tensor may wait for a tensor of another file."""
    hidden = hidden_names(patch)
    with ExitStack() as stack:
        for path in files:
            try:
                file = stack.enter_context(path.open("rb", buffering=0))
                ranges = tensor_ranges(path)
                with safe_open(path, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                        if path != patch and name in hidden:
                            continue
                        tensor = opened.get_tensor(name)
                        mapped.add(tensor, FilePosition(file, ranges[name][0]))
                        yield name, tensor
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}. Download it again.") from error


def _check_room(num_bytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and num_bytes > max_bytes:
        raise OutOfMemory(
            f"weights ({num_bytes / MIB:,.0f} MiB) exceed the free memory ({max_bytes / MIB:,.0f}"
            " MiB). Use a smaller model or dtype."
        )


def _no_progress(done: int, total: int) -> None:
    pass

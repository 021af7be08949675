"""Numerics of a loaded model: what determines the bits of its answers to prompt tokens, in words.

`base/requests/numerics.py` makes a fingerprint of the parts. A part may say too much, and then two
engines seem to differ though their bits are equal. It must not say too little.
"""

import functools
import hashlib
import json
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire.base.settings.config import ModelConfig
from quire.base.settings.fields import json_object
from quire.base.version import QUIRE_VERSION
from quire.engine.executors.loaded import LoadedElsewhere, LoadedModel
from quire.engine.start.preflight import tokenizer_source
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.formats import weight_formats
from quire.models.checkpoint.source import ModelSource
from quire.models.load.cache_files import file_identity
from quire.ops.host.native import core
from quire.ops.host.torch_import import import_torch
from quire.ops.weights.formats import ATTENTION, FORMATS, chosen_variants
from quire.render.generation import read_generation_defaults
from quire.render.media.model_files import processor_files
from quire.render.templates.chat_template import load_template
from quire.render.tokens.tokenizer_files import TokenizerFiles, text_files
from quire.spec.gguf.container import is_gguf

DUMMY = "dummy"
# Settings and files that turn a request into prompt tokens and sampling parameters.
TEXT_SETTINGS = (
    "tool_call_parser", "reasoning_parser", "generation_config", "override_generation_config",
    "default_chat_template_kwargs",
)  # fmt: skip
IN_ANY_BATCH, BY_BATCH = "equal in any batch", "depends on the batch"


def numerics_of(built: LoadedModel, source: ModelSource) -> dict[str, str]:
    """Return all parts but the weights."""
    config, dtype = built.config, str(built.dtype).removeprefix("torch.")
    device = [_device(built, _used_formats(built, source, dtype)), _batching(built)]
    if (num_shares := config.parallel.decode_context_parallel_size) > 1:
        device.append(f"context of {num_shares} ranks")
    formats = [
        dtype,
        f"weights {weight_formats(config.model)!r}",
        f"KV {config.cache.kv_cache_dtype} {sorted(built.kv_scales.items())!r}",
    ]
    return {
        "software": f"quire {QUIRE_VERSION}, core {_core_digest()}, torch {_torch_version()}",
        "device": ", ".join([*device, f"attention {built.backend_name}"]),
        "model": f"{built.spec.type_name} {built.spec.identity}",
        "formats": ", ".join(formats),
        "text": text_digest(config.model, source),
    }


def text_digest(config: ModelConfig, source: ModelSource) -> str:
    """Return a digest of tokenizer, chat template, image settings and generation defaults. Files
    count as in `weights_digest`; other files of the model's directory do not. A GGUF file of the
    model counts among its weights."""
    template, own = config.chat_template, source.directory
    facts: list[object] = [getattr(config, name) for name in TEXT_SETTINGS]
    facts.append(None if template is None else load_template(template))
    directory = tokenizer_source(config, source).directory
    files = text_files(directory) if directory.is_dir() else [directory]
    if directory.is_dir():
        tokenizer = TokenizerFiles(directory)
        facts.append([tokenizer.tokenizer_class, tokenizer.model_type])
    if own.is_dir():
        override = json_object("override_generation_config", config.override_generation_config)
        use_sampling = config.generation_config == "auto"
        facts.append(asdict(read_generation_defaults(own, None, use_sampling, override)))
        files += [path for path in processor_files(own) if path.is_file()]
    for path in files:
        if path != own:
            facts.append([path.name, *file_identity(path)[1::2]])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def weights_digest(path: Path, form: str, seed: int | None, patch: Path | None = None) -> str:
    """Return a digest of weights, given their path and load format. Names and times of files do not
    count. Large files are read in part (`models/load/cache_files.py`), a patch as a whole.

    patch: file with tensors that replace some of the path's. Raises OSError."""
    if form == DUMMY:
        return f"random numbers of seed {seed}"
    facts: list[object] = [file_identity(file)[1::2] for file in checkpoint_files(path)]
    if patch is not None:
        with patch.open("rb") as file:
            facts.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _used_formats(built: LoadedModel, source: ModelSource, dtype: str) -> tuple[str, ...]:
    """Return the formats whose instruction sets compute: all of them with quantised weights."""
    is_plain = built.config.model.quantization in (None, "none") and built.spec.quantization is None
    if is_plain and dtype in FORMATS and not is_gguf(source.directory):
        return tuple(dict.fromkeys((dtype, ATTENTION)))
    return FORMATS


def _device(built: LoadedModel, formats: tuple[str, ...]) -> str:
    """Name the device, and the instruction sets or the GPU that compute."""
    if built.device_type == "cpu":
        sets = ", ".join(f"{name} {chosen}" for name, chosen in chosen_variants(formats).items())
        return f"cpu: {sets or _torch_set()}, {platform.machine()}"
    if isinstance(built, LoadedElsewhere):
        return f"{built.device_type} of other processes on {platform.node()}"
    import_torch()
    import torch

    return f"{built.device_type}: {torch.cuda.get_device_name()}"


def _torch_set() -> str:
    """Name the instruction set of torch, which computes without the core."""
    import_torch()
    import torch

    return f"torch {torch.backends.cpu.get_cpu_capability()}"


def _batching(built: LoadedModel) -> str:
    """Return whether bits depend on the batch, in words. Torch's products on a CPU do."""
    on_cpu = built.device_type == "cpu"
    is_same = core() is not None if on_cpu else built.config.deterministic
    return IN_ANY_BATCH if is_same else BY_BATCH


@functools.cache
def _core_digest() -> str:
    """Return a digest of the C++ core's file; `none` without the core."""
    module = core()
    if module is None:
        return "none"
    with Path(str(module.__file__)).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


@functools.cache
def _torch_version() -> str:
    """Return the installed version of torch, which takes a tenth of the start of a tiny model."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"

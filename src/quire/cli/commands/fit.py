"""`quire fit MODEL`: whether a model fits this machine or a named GPU, before anything is loaded.

Reads only the config and the headers of the weight files.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.base.errors import OutOfMemory
from quire.base.settings.config import config_from_flat
from quire.cli.model_files import DEVICE_HELP, find_config, find_device
from quire.cli.options.help_parser import Commands
from quire.cli.settings import add_some_settings, given_settings
from quire.spec.cache_group import CHUNKED

if TYPE_CHECKING:
    from quire.spec.model_spec import ModelSpec
    from quire.tools.sizing.alternatives import Alternative
    from quire.tools.sizing.fit import DoesNotFit, Fit

SETTINGS = (
    "model", "model_impl", "revision", "dtype", "max_model_len", "load_format", "quantization",
    "quantization_group_size", "quantized_head", "block_size", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens",
    "speculative_config", "tensor_parallel_size", "pipeline_parallel_size",
    "decode_context_parallel_size", "data_parallel_size", "enable_expert_parallel",
    "hf_overrides", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras",
    "lora_target_modules",
)  # fmt: skip
MIB = 1 << 20
GIB = 1 << 30
NOTHING_KEPT = "none: a prompt is computed in one step"


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "fit",
        usage="quire fit [MODEL] [--device NAME] [option ...]",
        help="show how many requests of a model fit a device",
        description="Show the memory of MODEL (by default the demo model) on a device: weights, KV"
        " pool, and how many requests fit. Compare other formats. Only the config and the headers"
        " of the weight files are read.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--device",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help=DEVICE_HELP,
    )
    add_some_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from quire.tools.sizing.fit import DoesNotFit, fit

    settings = given_settings(arguments)
    device = find_device(settings.pop("device", "auto"))
    config = config_from_flat(**settings)
    source = find_config(config.model)
    try:
        found = fit(config, source, device)
    except DoesNotFit as error:
        raise OutOfMemory("\n".join((str(error), *_what_fits(error)))) from error
    if arguments.json:
        print(json.dumps(as_data(found), indent=2))
    else:
        for line in _lines(found):
            print(line)
    return 0


def as_data(found: "Fit") -> dict[str, Any]:
    """Return all figures as JSON data."""
    config, memory = found.config, found.memory
    return {
        "model": {"name": found.model, "type": found.spec.model_type, "dtype": config.model.dtype},
        "device": asdict(found.device),
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size,
        "data_parallel_size": config.parallel.data_parallel_size,
        "settings": {
            "max_model_len": memory.max_model_len,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            "block_size": memory.block_size,
            "quantization": config.model.quantization,
            "kv_cache_dtype": config.cache.kv_cache_dtype,
            "gpu_memory_utilization": config.cache.gpu_memory_utilization,
        },
        "weights": {
            "bytes": memory.weights_bytes,
            "formats": {each.name: each.num_bytes for each in found.weights},
        },
        "workspace_bytes": memory.workspace_bytes,
        "encoding_bytes": found.encoding_bytes,
        "encoder_cache_bytes": found.encoder_cache_bytes,
        "adapter_bytes": found.adapter_bytes,
        "graph_bytes": memory.graph_bytes,
        "kv": {
            "bytes_per_token": sum(group.token_bytes for group in found.groups),
            "groups": [asdict(group) for group in found.groups],
        },
        "pool": {
            "bytes": memory.pool_bytes,
            "blocks": list(memory.num_blocks),
            "tokens": memory.num_slots,
        },
        "requests": [asdict(each) for each in found.requests],
        "alternatives": [asdict(each) for each in found.alternatives],
        "gguf_files": [asdict(each) for each in found.gguf_files],
        "warnings": list(found.warnings),
    }


# ---- text output -----------------------------------------------------------------------------


def _lines(found: "Fit") -> Iterator[str]:
    config, memory, device = found.config, found.memory, found.device
    rows = config.scheduler.max_num_seqs
    formats = ", ".join(f"{each.name} {_size(each.num_bytes)}" for each in found.weights)
    is_gpu = device.kind != "cpu"
    share = f", of which {config.cache.gpu_memory_utilization:.0%} may be used" if is_gpu else ""
    available = "" if is_gpu else " available"
    yield from _section(
        "model",
        ("name", f"{found.model} ({found.spec.type_name}, {config.model.dtype})"),
        ("device", f"{device.name}: {_size(device.memory_bytes)}{available}{share}{_ranks(found)}"),
    )
    yield from _section(
        "memory",
        ("weights", f"{_size(memory.weights_bytes)} ({formats})"),
        ("workspace", f"{_size(memory.workspace_bytes)}{' (from the shape)' if is_gpu else ''}"),
        *_of_encoder(found),
        *_of_adapters(found),
        *([("graphs", _size(memory.graph_bytes))] if memory.graph_bytes else []),
        *(_of_pool(found) if memory.pool_bytes else [("KV", NOTHING_KEPT)]),
    )
    yield f"requests that fit at once (max_num_seqs {rows}, max_model_len {memory.max_model_len:,})"
    lengths = [f"{each.length:,}" for each in found.requests]
    yield from _table(
        [["tokens each", *lengths], ["requests", *(f"{each.at_once:,}" for each in found.requests)]]
    )
    yield f"with other formats (requests of {memory.max_model_len:,} tokens)"
    yield from _formats(found.alternatives, found.spec)
    if found.gguf_files:
        yield f"as a GGUF file (requests of {memory.max_model_len:,} tokens)"
        yield from _formats(found.gguf_files, found.spec)
    if found.warnings:
        yield "warnings"
        yield from (f"  ! {each}" for each in found.warnings)


def _of_adapters(found: "Fit") -> Iterator[tuple[str, str]]:
    """Yield the part of the workspace for adapters."""
    if found.adapter_bytes:
        rank = found.config.lora.max_lora_rank
        adapters = f"{found.num_adapters} adapters of rank {rank}"
        yield "  of which", f"{_size(found.adapter_bytes)} for {adapters}"


def _of_encoder(found: "Fit") -> Iterator[tuple[str, str]]:
    """Yield the parts of the workspace for images and videos."""
    if found.encoder_cache_bytes:
        items = f"an image of {found.largest_item:,} tokens"
        slots = f"outputs of {found.config.scheduler.encoder_cache_tokens:,} tokens"
        yield "  encoding", f"up to {_size(found.encoding_bytes)} of it ({items})"
        yield "  encoder cache", f"{_size(found.encoder_cache_bytes)} of it ({slots})"


def _ranks(found: "Fit") -> str:
    """Return a note on the number of ranks and cores, and on the rank that the figures describe."""
    parallel = found.config.parallel
    num_stages, num_cores = parallel.pipeline_parallel_size, parallel.data_parallel_size
    each = f"each of the fullest of {num_stages} stages" if num_stages > 1 else "each"
    ranks = f"{parallel.num_ranks} such ranks share"
    if num_cores > 1 and parallel.num_ranks > 1:
        return f"; {num_cores} cores with a model each, which {ranks}, of {each}:"
    if num_cores > 1:
        return f"; {num_cores} cores with a model each, of each:"
    return f"; {ranks} the model, of {each}:" if parallel.num_ranks > 1 else ""


def _of_pool(found: "Fit") -> Iterator[tuple[str, str]]:
    memory = found.memory
    yield from _of_groups(found)
    blocks = f"{max(memory.num_blocks):,} blocks of {memory.block_size}"
    yield "KV pool", f"{_size(memory.pool_bytes)} = {memory.num_slots:,} tokens in {blocks}"


def _of_groups(found: "Fit") -> Iterator[tuple[str, str]]:
    for group in found.groups:
        text = f"{_size(group.token_bytes)} per token, {_size(group.block_bytes)} per block"
        if not group.token_bytes:
            text = f"{_size(group.block_bytes)} per state"
        text += f" in {group.num_layers} layer{'s' if group.num_layers > 1 else ''}"
        if group.window is not None:
            kind = "chunks" if group.kind == CHUNKED else "a window"
            text += f" with {kind} of {group.window:,}"
        if len(found.groups) > 1:
            text += f": {group.num_blocks:,} {'blocks' if group.token_bytes else 'states'}"
        yield "KV", text


def _what_fits(error: "DoesNotFit") -> list[str]:
    """Return a table of the formats with which a shorter request fits; empty without any."""
    fitting = [each for each in error.formats if each.longest]
    if not fitting:
        return []
    rows = [
        [each.weights, each.kv, _size(each.weights_bytes), f"{each.longest:,}", f"{each.usual:,}"]
        for each in fitting
    ]
    head = ["weights", "KV", "weights", "longest request", _usual(error.spec)]
    return ["with --max-model-len auto these fit:", *_table([head, *rows])]


def _formats(formats: Sequence["Alternative"], spec: "ModelSpec") -> Iterator[str]:
    """Yield a table of formats. longest: tokens of the longest request that fits."""
    names = ["weights", "KV", "weights", "KV pool", "tokens", "requests", "longest"]
    yield from _table([[*names, _usual(spec), ""], *map(_cells, formats)])


def _usual(spec: "ModelSpec") -> str:
    """Return the heading of the number of usual requests that fit at once."""
    from quire.tools.sizing.alternatives import usual_length

    return f"{usual_length(spec):,} each"


def _cells(each: "Alternative") -> list[str]:
    sizes = [_size(each.weights_bytes), _size(each.pool_bytes) if each.pool_bytes else "-"]
    counts = (each.num_slots, each.at_once, each.longest, each.usual)
    return [each.weights, each.kv, *sizes, *(f"{count:,}" for count in counts), each.note]


def _section(title: str, *facts: tuple[str, str]) -> Iterator[str]:
    yield title
    for name, value in facts:
        yield f"  {name:18} {value}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: words are aligned left, figures right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_figure = [column[-1][:1].isdigit() for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_figure, strict=True)
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:,.1f} KiB"

"""`quire doctor [MODEL]`: the facts of this machine, the settings quire would use, and problems.

Loads no weights. The exit status is 1 if a problem is fatal.
"""

import argparse
import json
import os
import platform
import resource
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from quire.base.errors import QuireError
from quire.base.plugins import installed
from quire.base.settings.config import config_from_flat
from quire.base.version import QUIRE_VERSION
from quire.cli import machine
from quire.cli.options.help_parser import Commands
from quire.cli.settings import add_settings, given_settings
from quire.ops.weights.kernel_choice import CLEARLY, Speed, choose_variant, gain_over
from quire.runner.setup.step_size import MIN_TOKENS, STEP_S
from quire.spec.gguf.container import GGUFFile, is_gguf

if TYPE_CHECKING:  # it imports torch, which may be missing
    from quire.runner.setup.preview import Preview

OLDEST_PYTHON = (3, 11)
FEW_FILES = 1024  # low limit of open files; each stream needs one
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Problem:
    """An obstacle and its cure. `is_fatal` means that nothing can be served."""

    what: str
    advice: str
    is_fatal: bool = False


@dataclass
class Report:
    """The facts by section and name, in the order of display, and the problems."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, what: str, advice: str, is_fatal: bool = False) -> None:
        self.problems.append(Problem(what, advice, is_fatal))


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        usage="quire doctor [MODEL] [option ...]",
        help="check this machine, and show what quire would use",
        description="Check this machine, and show the settings with which MODEL (by default the"
        " demo model) would run. No weights are loaded.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser, model_first=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    report = examine(given_settings(arguments))
    if arguments.json:
        problems = [asdict(problem) for problem in report.problems]
        print(json.dumps({**report.facts, "problems": problems}, indent=2))
    else:
        _show(report)
    return int(any(problem.is_fatal for problem in report.problems))


def examine(settings: dict[str, Any]) -> Report:
    """Return a full report for an engine with these settings."""
    report = Report()
    _python(report)
    _plugins(report)
    cpu = _cpu(report)
    _memory(report)
    gpus = machine.gpus()
    report.facts["gpu"] = {str(index): gpu for index, gpu in enumerate(gpus)}
    if _packages(report):
        _torch(report, cpu, has_gpu=bool(gpus))
        _core(report, cpu)
        _model(report, settings)
    _environment(report)
    return report


def _python(report: Report) -> None:
    report.facts["system"] = {
        "quire": QUIRE_VERSION,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
    if sys.version_info < OLDEST_PYTHON:
        report.add_problem("this Python is older than 3.11", "install a newer one", is_fatal=True)
    if sys.platform != "linux":
        report.add_problem(f"this is {sys.platform}", "quire needs Linux", is_fatal=True)


def _plugins(report: Report) -> None:
    """Add other packages' plug-ins to the report, without importing them."""
    facts: dict[str, list[str]] = {}
    for name, noun, package in installed():
        facts.setdefault(name, []).append(f"{noun} of {package}")
    report.facts["plug-ins"] = facts


def _cpu(report: Report) -> machine.Cpu:
    cpu = machine.cpu()
    report.facts["cpu"] = {
        "name": cpu.name,
        "cores": cpu.num_cores,
        "usable cores": cpu.num_usable,
        "quota of cores": cpu.quota,
        "features": list(cpu.features),
    }
    if platform.machine() != "x86_64":
        return cpu
    if "avx512f" not in cpu.features:
        report.add_problem(
            "this CPU has no AVX-512", "everything works, slower; small models suit it best"
        )
    return cpu


def _memory(report: Report) -> None:
    facts: dict[str, Any] = {"total bytes": machine.memory_bytes()}
    report.facts["memory"] = facts


def _packages(report: Report) -> bool:
    """Add the dependencies' versions to the report; return whether all are installed."""
    versions = machine.dependencies()
    report.facts["packages"] = versions
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        report.add_problem(
            f"not installed: {', '.join(missing)}",
            f"run: {sys.executable} -m pip install {' '.join(missing)}",
            is_fatal=True,
        )
    return not missing


def _torch(report: Report, cpu: machine.Cpu, has_gpu: bool) -> None:
    from quire.runner.memory_plan import available_cpu_bytes
    from quire.runner.setup.preview import torch_facts

    report.facts["memory"]["available bytes"] = available_cpu_bytes()
    torch = torch_facts()
    report.facts["torch"] = {
        "version": torch.version,
        "cuda": torch.cuda,
        "threads": torch.num_threads,
        "gpus": [list(gpu) for gpu in torch.gpus],
    }
    if has_gpu and not torch.gpus:
        reason = "is a build without CUDA" if torch.cuda is None else "cannot use its driver"
        report.add_problem(
            f"there is a GPU, but this torch {reason}",
            "install torch's CUDA build for this driver (see pytorch.org), or use --device cpu",
        )
    if cpu.quota is not None and torch.num_threads > max(1, cpu.quota):
        report.add_problem(
            f"torch has {torch.num_threads} threads, but the control group allows"
            f" {cpu.quota:g} cores",
            f"set OMP_NUM_THREADS={max(1, int(cpu.quota))}",
        )


def _core(report: Report, cpu: machine.Cpu) -> None:
    from quire.ops.host import fast_cores, native, threads

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        core = native.core()
    report.facts["C++ core"] = {"present": core is not None, "threads": threads.num_threads()}
    found = fast_cores.core_speeds()
    report.facts["cores of quire serve"] = {"chosen": found.reason} | {
        f"GFLOP/s of CPU {number}": round(speed / 1e9) for number, speed in found.speeds.items()
    }
    if core is not None:
        _kernels(report)
    else:
        reason = str(caught[0].message) if caught else "the C++ core is not there"
        report.add_problem(reason, "install g++, then `touch CMakeLists.txt && make install`")
        if not {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu.features):
            report.add_problem(
                "this CPU does not multiply bfloat16, and the core is not there",
                "16-bit models run in float32 and take twice the memory of their files",
            )


def _kernels(report: Report) -> None:
    """Add each weight format's kernel to the report, with the reason for the choice."""
    from quire.ops.weights import formats

    try:
        forced = formats.forced_variant()
    except QuireError as error:
        advice = f"unset {formats.VARIANT}, or name one of these"
        report.add_problem(str(error), advice, is_fatal=True)
        return
    measured, names = formats.measurement(), formats.variants()
    facts: dict[str, Any] = {
        name: _reason(speeds, names, forced) for name, speeds in measured.speeds.items()
    }
    when = datetime.fromtimestamp(measured.measured_s).isoformat(" ", "seconds")
    path = formats.measurement_file().path
    kept = f"kept in {path}; remove it to measure again" if path.exists() else "not kept"
    facts["measured"] = f"{when} in {1e3 * measured.took_s:.0f} ms; {kept}"
    report.facts["kernels"] = facts


def _reason(speeds: Mapping[str, Speed], names: Sequence[str], forced: str | None) -> str:
    """Return a format's chosen instruction set, the reason, and the speeds of all sets.

    The speeds are one thread's: FLOP/s with a tile of rows, and bytes/s of weights with one row."""
    chosen, default = forced or choose_variant(speeds, names), names[-1]
    if forced is not None:
        why = "as QUIRE_CPU_VARIANT says"
    elif chosen == default:
        why = f"none is {CLEARLY:g} times as fast"
    else:
        why = f"{gain_over(speeds, chosen, default):.2f} times as fast as {default}"
    figures = (
        f"{name} {speeds[name].tile_flops / 1e9:,.0f} and {speeds[name].row_bytes_per_s / 1e9:,.0f}"
        for name in reversed(names)
    )
    return f"{chosen}: {why} (GFLOP/s and GB/s of a thread: {', '.join(figures)})"


def _model(report: Report, settings: dict[str, Any]) -> None:
    """Add the engine's choices for the model to the report."""
    from quire.models.checkpoint.source import CONFIG_ONLY, resolve_source
    from quire.runner.setup.preview import preview_runner

    try:
        config = config_from_flat(**settings)
        source = resolve_source(config.model, progress=False, files=CONFIG_ONLY)
        preview = preview_runner(config, source)
    except QuireError as error:
        name = settings.get("model", "demo")
        report.add_problem(f"model {name}: {error}", "the message says what to do", is_fatal=True)
        return
    config, memory = preview.config, preview.memory
    measured = f"weights {preview.weights_bytes / MIB:,.0f} MiB; the rest is measured at the start"
    report.facts["model"] = {
        "name": source.name,
        "runs by": preview.runs_by,
        "device": config.device,
        "dtype": config.model.dtype,
        "attention": preview.attention_backend,
        "tokens per step": preview.first_budget or config.scheduler.max_num_batched_tokens,
        "step budget": _budget(preview),
        "sequences at once": config.scheduler.max_num_seqs,
        "max_model_len": config.model.max_model_len if memory is None else memory.max_model_len,
        "memory plan": (measured if memory is None else memory.describe().removeprefix("memory: ")),
    }
    if is_gguf(source.directory):
        report.facts["model"]["tensors"] = GGUFFile(source.directory).describe()


def _budget(preview: "Preview") -> str:
    """Return a description of the step budget."""
    limit = preview.config.scheduler.max_num_batched_tokens
    if preview.first_budget is None:
        return f"always {limit} tokens"
    return (
        f"{preview.first_budget} tokens by the measured kernels, then what takes"
        f" {1e3 * STEP_S:.0f} ms, from {MIN_TOKENS} to {limit}; memory is planned for {limit}"
    )


def _environment(report: Report) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    offline = [name for name in OFFLINE if os.environ.get(name, "").lower() in ("1", "true", "yes")]
    report.facts["environment"] = {
        "open files": files,
        "HF_HOME": os.environ.get("HF_HOME"),
        "offline": offline,
    }
    if offline:
        report.add_problem(
            f"{offline[0]} is set, so models are not downloaded",
            f"unset {offline[0]}, or give a directory",
        )
    if files < FEW_FILES:
        report.add_problem(f"only {files} files may be open", f"run: ulimit -n {FEW_FILES * 4}")


def _show(report: Report) -> None:
    for section, facts in report.facts.items():
        print(section)
        for name, value in facts.items():
            print(f"  {name.removesuffix(' bytes'):18} {_text(name, value)}")
        if not facts:
            print("  none")
    print("problems")
    for problem in report.problems:
        print(f"  {'!' if problem.is_fatal else '-'} {problem.what}")
        print(f"    {problem.advice}")
    if not report.problems:
        print("  none")


def _text(name: str, value: Any) -> str:
    if name.endswith(" bytes"):
        return f"{value / GIB:.1f} GiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    return "none" if value is None else str(value)

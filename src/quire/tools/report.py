"""The facts in every benchmark's report: machine, versions, date and commit."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks. description: the script's docstring."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there")
    return parser


def machine_facts() -> dict[str, Any]:
    """Return the facts of machine and software."""
    import torch

    from quire.ops.host.threads import num_threads

    return plain_facts() | {
        "threads": num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }


def plain_facts() -> dict[str, Any]:
    """Return the facts that need no torch, for benchmarks of a server."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }


def print_head(title: str) -> None:
    """Print the benchmark's title, machine and versions."""
    facts = machine_facts()
    device = facts["gpu"] or f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads"
    print(f"# {title}")
    print(
        f"# {device}; torch {facts['torch']}, Python {facts['python']}; {facts['date']}, commit"
        f" {facts['commit']}",
        flush=True,
    )


def write_report(
    path: Path | None,
    results: dict[str, Any],
    facts: Callable[[], dict[str, Any]] = machine_facts,
) -> None:
    """Write results and the machine's facts as JSON, if a path was given. Raises ConfigError."""
    if path is None:
        return
    text = json.dumps(results | {"machine": facts()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the results cannot be written to {path}: {error.strerror}.") from error


def cpu_name() -> str:
    """Return the processor's name from /proc/cpuinfo, with family and model, which some names
    lack."""
    fields: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    name = fields.get("model name", platform.machine())
    if "cpu family" not in fields:
        return name
    return f"{name} (family {fields['cpu family']}, model {fields.get('model', '?')})"


def commit() -> str | None:
    """Return the commit of this file's checkout, with a `+` if the checkout has changes."""
    directory = Path(__file__).parent
    head = _git(directory, "rev-parse", "--short", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git(directory, "status", "--porcelain") else "")


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

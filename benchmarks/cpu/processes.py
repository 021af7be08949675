"""One process per engine, workload and round: what it printed, and when."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.noise import AVX512_THREADS, MAX_OTHERS
from benchmarks.cpu.preparation import Unavailable
from benchmarks.cpu.workloads import Workload

ROOT = Path(__file__).parents[2]
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True)
class Run:
    """others: cores that other processes kept busy meanwhile. stolen: cores that the host took
    while its process lived. read_bytes_per_s: of memory, by all threads, just before."""

    engine: str
    workload: str
    round: int
    metrics: dict[str, float]
    others: float
    stolen: float = 0.0
    read_bytes_per_s: float = 0.0

    @property
    def is_quiet(self) -> bool:
        return self.others <= MAX_OTHERS

    def __str__(self) -> str:
        shown = ", ".join(f"{key} {value:.4g}" for key, value in self.metrics.items())
        machine = f"others {self.others:.2f}, stolen {self.stolen:.2f}"
        reading = f"reading {self.read_bytes_per_s / 1e9:.1f} GB/s"
        return f"{self.engine}: {self.workload}: {shown} ({machine}, {reading})"


@dataclass
class Output:
    """The lines that a driver printed. first_line_s: seconds from the start of the process."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    first_line_s: float = 0.0


def environment_variables(threads: int) -> dict[str, str]:
    """Return the variables of a driver. Byte code may be written, so a second start finds it."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return found | VARIABLES | {"OMP_NUM_THREADS": str(threads)}


def run_driver(python: Path, driver: str, job: dict[str, Any], log: Path, max_s: float) -> Output:
    """Run a driver. Raises Unavailable with the last line of its errors if it fails or takes too
    long."""
    command = [str(python), "-m", f"benchmarks.cpu.drivers.{driver}", json.dumps(job)]
    output, began = Output(), time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment_variables(job["threads"]), text=True,
            stdout=subprocess.PIPE, stderr=errors,
        ) as process,
    ):  # fmt: skip
        watch = threading.Timer(max_s, process.kill)
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            _take(output, line, time.perf_counter() - began)
        status = process.wait()
        watch.cancel()
    if status != 0 or not output.runs:
        if time.perf_counter() - began >= max_s:
            raise Unavailable(f"took longer than {max_s:.0f} s")
        lines = log.read_text(errors="replace").strip().splitlines()
        raise Unavailable(f"exit status {status}: {lines[-1] if lines else 'no message'}"[:300])
    return output


def _take(output: Output, line: str, at_s: float) -> None:
    """Add a line to the output. Lines that are not ours are the engine's chatter."""
    try:
        content = json.loads(line)
    except ValueError:
        return
    if isinstance(content, dict) and "memory" in content:
        output.memory = content["memory"]
    elif isinstance(content, dict) and "metrics" in content:
        output.first_line_s = output.first_line_s or at_s
        output.runs.append(content)


def runs_of(output: Output, engine: Engine, workload: Workload, round_: int) -> list[Run]:
    """Return the runs, with values that only the parent knows: the whole start, and memory above
    weights and KV."""
    found = []
    for run in output.runs:
        metrics = dict(run["metrics"])
        if workload.name == "start":
            metrics["start_s"] = output.first_line_s
        if workload.name == "batch" and output.memory is not None:
            kv_bytes = output.memory["kv_bytes"]
            if kv_bytes is None:
                kv_bytes = workload.num_tokens * workload.shape.kv_bytes_per_token
            weights = engine.format.weight_bytes(workload.shape)
            metrics["above_mib"] = (output.memory["peak_bytes"] - weights - kv_bytes) / 2**20
            metrics["peak_mib"] = output.memory["peak_bytes"] / 2**20
        if output.memory is not None:
            metrics[AVX512_THREADS] = output.memory.get(AVX512_THREADS, 0)
        found.append(Run(engine.name, workload.name, round_, metrics, run["others"]))
    return found


def import_torch_s(python: Path, rounds: int = 3) -> float:
    """Return the seconds that importing torch adds to a fresh interpreter."""
    best = {"pass": float("inf"), "import torch": float("inf")}
    for _ in range(rounds):
        for code in best:
            began = time.perf_counter()
            subprocess.run([str(python), "-c", code], check=True, env=environment_variables(1))
            best[code] = min(best[code], time.perf_counter() - began)
    return best["import torch"] - best["pass"]


def measured_ceilings(threads: int) -> dict[str, float]:
    """Run `benchmarks.cpu.limits` in a process of its own. Raises Unavailable."""
    command = [sys.executable, "-m", "benchmarks.cpu.limits", "--threads", str(threads)]
    variables = environment_variables(threads)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    if done.returncode != 0:
        raise Unavailable((done.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, float] = json.loads(done.stdout)
    return found

"""Measures on one GPU, in pieces, each a process of its own that may fail or be stopped alone.

    python -m benchmarks.gpu --part first
    python -m benchmarks.gpu --part bench [--pieces limits,llama-8b] [--budget-s 480]
    python -m benchmarks.gpu --part peers
    python -m benchmarks.gpu --part bench --device cpu --tiny      # does the code work?

Results go to $OUT, or to build/gpu (build/gpu-tiny with --tiny). They are gpu_PART.json,
gpu_PART.md and gpu_PART.summary.txt, written again after each piece, and a file for each piece. The
rows of all pieces are in gpu_PART.result.json, in the form of benchmarks/results. The last lines
are the most important: the aims, skipped cases and failures. The exit status is 1 if something
failed, even if the rest has results. A skipped case or a missed aim is not a failure.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.interpreter import repair_interpreter
from benchmarks.gpu.peers import comparison
from benchmarks.gpu.pieces import Piece, chosen
from benchmarks.gpu.report import Report, markdown, read_piece, summary
from benchmarks.result_files import options_of, write

ROOT = Path(__file__).parents[2]
GRACE_S = 15.0  # for a piece to end by itself once its time is over
MIN_S = 5.0  # with less left no piece is begun


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        pieces = chosen(options.part, options.pieces)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    default_folder = ROOT / "build" / ("gpu-tiny" if options.tiny else "gpu")
    out = options.out or Path(os.environ.get("OUT") or default_folder)
    if options.one:
        status = run_one(pieces[0], options, out)
        sys.stdout.flush()
        os._exit(status)  # threads that another engine left behind would keep the process
    if pieces[0].name != "limits" and measured_limits(out) is None:
        # The others' shares are of its limits. Whether answers are right at all comes before.
        at = sum(piece.is_first for piece in pieces)
        pieces[at:at] = chosen("bench", "limits")
    return Session(options, out, pieces).run()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--part", choices=("first", "bench", "peers"), default="bench")
    made.add_argument("--pieces", default="", help="only these, by name")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="small sizes, to see that it works")
    made.add_argument("--budget-s", type=float, default=480.0, help="for all pieces together")
    made.add_argument("--out", type=Path, help="directory for the results")
    made.add_argument("--once", action="store_true", help="call each kernel once, untimed")
    made.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in this process
    made.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return made


@dataclass
class Session:
    """The parent: starts a process for each piece, gathers what they write."""

    options: argparse.Namespace
    out: Path
    pieces: list[Piece]
    found: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """Run all pieces that there is time for. Returns the exit status."""
        end = time.monotonic() + self.options.budget_s
        self.facts = device_facts()
        print("; ".join(f"{name} {value}" for name, value in self.facts.items()), flush=True)
        for piece in self.pieces:
            left = end - time.monotonic()
            if left < MIN_S:
                self._save(skipped_piece(piece, self.out, "the time is used up"))
                continue
            self._run_piece(piece, min(left, piece.limit_s))
        self._write_result()
        self._print_summary()
        return 1 if any(piece["errors"] for piece in self.found) else 0

    def _run_piece(self, piece: Piece, allowed_s: float) -> None:
        path = piece_path(self.out, piece)
        path.unlink(missing_ok=True)
        print(f"\n== {piece.name}, {allowed_s:.0f} s at most", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu", "--one", "--part", piece.part]
        command += ["--pieces", piece.name, "--device", self.options.device]
        command += ["--out", str(self.out), "--until", str(began + allowed_s)]
        command += ["--tiny"] if self.options.tiny else []
        status = run_for(command, allowed_s + GRACE_S)
        found = read_piece(path) or empty_piece(piece, self.out)
        found["seconds"]["process"] = round(time.monotonic() - began, 1)
        if status == "stopped":
            found["skipped"].append(f"the rest: stopped after {allowed_s + GRACE_S:.0f} s")
        elif status not in (0, 1):
            text = f"the process ended with status {status}"
            found["errors"].append({"case": "the process", "traceback": text})
        print(f"== {piece.name}: {found['seconds']['process']} s", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        self._save(found)

    def _save(self, piece: dict[str, Any]) -> None:
        """Write all that there is."""
        self.found.append(piece)
        part = self.options.part
        title = f"GPU benchmarks: {part}" + (" (tiny; no figures)" if self.options.tiny else "")
        text = markdown(title, self.facts, self.found)
        text += "\n".join(["", *comparison(self.found)])
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"gpu_{part}.md").write_text(text, encoding="utf-8")
        whole = {"facts": self.facts, "pieces": self.found}
        (self.out / f"gpu_{part}.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        lines = "\n".join(summary(self.found, part == "first"))
        (self.out / f"gpu_{part}.summary.txt").write_text(lines + "\n", encoding="utf-8")

    def _write_result(self) -> None:
        rows = [{"piece": found["piece"], **row} for found in self.found for row in found["rows"]]
        if rows and "cpu" in self.facts:
            path = self.out / f"gpu_{self.options.part}.result.json"
            write(path, "gpu", rows, options_of(self.options), lambda: dict(self.facts))

    def _print_summary(self) -> None:
        path = self.out / f"gpu_{self.options.part}.md"
        print(f"\n{path.with_suffix('.summary.txt').read_text(encoding='utf-8')}")
        print(f"all of it: {path}")


def run_for(command: Sequence[str], limit_s: float) -> int | str:
    """Run a command with its children; return the exit status, or `stopped` if it took longer."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "stopped"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own group: workers of an engine, too
        process.wait()


def run_one(piece: Piece, options: argparse.Namespace, out: Path) -> int:
    """Run a piece in this process; an error is written to its file."""
    report = Report(piece.name, piece_path(out, piece))
    report.write()
    began = time.monotonic()
    until = options.until or began + min(options.budget_s, piece.limit_s)
    try:
        _run_in_context(piece, options, out, report, until)
    except Exception as error:
        if type(error).__name__ != "OutOfTime":
            report.fail("the piece", error)
    report.seconds["piece"] = round(time.monotonic() - began, 1)
    report.write()
    return 1 if report.errors else 0


def _run_in_context(
    piece: Piece, options: argparse.Namespace, out: Path, report: Report, until: float
) -> None:
    """Run a piece after importing torch; Triton reads its setting when it is imported."""
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        repair_interpreter()
    import torch

    from benchmarks.gpu.context import Bench

    if options.device == "cuda" and not torch.cuda.is_available():
        report.skip(piece.name, "torch sees no CUDA device")
        return
    bench = Bench(torch.device(options.device), report, until, options.tiny)
    bench.runs_once = options.once
    bench.measured = measured_limits(out)
    with torch.inference_mode():
        piece.load()(bench)


def measured_limits(out: Path) -> Any:
    """Return the results of the piece `limits`, from this or an earlier run on this machine, or
    None."""
    from benchmarks.gpu.floors import Limits

    found = read_piece(out / "gpu_bench.limits.json")
    numbers = (found or {}).get("facts", {}).get("limits")
    return Limits(**numbers) if numbers else None


def device_facts() -> dict[str, Any]:
    """Return facts from another process, so that this one holds no memory of the device."""
    code = (
        "import json\nfrom quire.tools.report import machine_facts\nfacts = machine_facts()\n"
        "import importlib.metadata as m\n"
        "for name in ('triton', 'transformers', 'vllm', 'sglang'):\n"
        "    try:\n        facts[name] = m.version(name)\n"
        "    except m.PackageNotFoundError:\n        facts[name] = None\n"
        "import torch\nfacts['cuda'] = torch.version.cuda\n"
        "print(json.dumps(facts))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
        )
        facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {"facts": f"could not be found: {traceback.format_exc(limit=1)}"}
    return facts


def piece_path(out: Path, piece: Piece) -> Path:
    return out / f"gpu_{piece.part}.{piece.name}.json"


def empty_piece(piece: Piece, out: Path) -> dict[str, Any]:
    """Return the report of a piece that wrote none."""
    report = Report(piece.name, piece_path(out, piece))
    report.write()
    found = read_piece(report.path)
    assert found is not None
    return found


def skipped_piece(piece: Piece, out: Path, why: str) -> dict[str, Any]:
    found = empty_piece(piece, out)
    found["skipped"].append(f"{piece.name}: {why}")
    return found


if __name__ == "__main__":
    sys.exit(main())

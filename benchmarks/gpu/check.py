"""Check quire on a GPU: right answers and speed. `.ci/gpu-check` starts this.

PART selects the checks; the default is `first`, which takes eight minutes:
  first     answers and speed of the demo model, then a 0.6B, then an 8B
  kernels   every Triton kernel, compiled, against its reference
  models    tokens of small models on the GPU against the CPU's, the memory plan, swaps
  ranks     two GPUs: exchanges over NCCL, tokens of small models against one GPU's
  bench     limits, whole steps, attention and kernels, each with its least time
  peers     the same requests by quire and by the other installed engines
  tools     ncu and compute-sanitizer on bounded cases, where they are installed
  all       these, one after the other, each with a time of its own

PLAN=30min is half an hour in four calls (benchmarks/gpu/plan.py); DRY=1 prints them, CALL=1 to 4
runs one.

Each check that may fail, hang, crash or print without end is a process of its own, and does not
affect the others. All output and measurements are in one archive, $OUT/gpu-check.tar.gz (build/ if
OUT is not set). It is written again during the run, so that it exists if the run is cut off. At
most 60 lines are printed last: right results, failures with their first error, speeds. Nothing is
installed; missing packages are searched in build/gpu-site. The exit status is 1 if a check failed
or was stopped. Checks that lack a device or a package are named, and are not failures.

Only the standard library is used here, so that this works whatever else is broken.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.passed import FILE, Passed
from benchmarks.gpu.plan import CHANGED, MAX_CALL_S, PLANS, Stage, described
from benchmarks.gpu.results import Archive, by_importance, fitted, is_good, line_of
from benchmarks.gpu.tasks import Outcome, Runner, Task, tail

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "gpu-site"
CORE = SITE / "core"  # the C++ core, for one version of Python
PACKAGE = ROOT / "src" / "quire"
PARTS = ("first", "kernels", "models", "ranks", "bench", "peers", "tools")
TESTED = {
    "kernels": ("tests/kernels", "tests/runner/gpu"),
    "models": ("tests/gpu",),
    "ranks": ("tests/gpu/ranks",),
}
ON_GPU = ("models", "ranks")  # whose tests need one
NUM_OF_RANKS = 2  # GPUs
NEEDED = ("numpy", "msgspec", "safetensors", "tokenizers", "jinja2", "huggingface_hub")
USEFUL = ("triton", "pytest", "hypothesis", "transformers", "vllm", "sglang")
# A kernel is compiled in some seconds, by one core; a process takes ten to begin.
TESTS_PER_PROCESS = 20
MARGIN_S = 40.0  # for the benchmarks to end by themselves, and for what comes behind them
MAX_JOBS = 12  # each process holds half a GiB of the device
QUESTION_S = 120.0
# Command lines of the tools, and the piece that each one watches.
TOOLS = {
    "memcheck": (
        "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck",
        "kernels",
    ),
    "ncu-attention": ("ncu --clock-control none --set full -k regex:_attention -c 4", "attention"),
    "racecheck": ("compute-sanitizer --tool racecheck", "attention"),
    "ncu-few-rows": ("ncu --clock-control none --set full -k regex:_few_rows -c 4", "kernels"),
}
TOOL_S, CASES_S = 45.0, 25.0  # of one tool, and of the cases under it, which begin no further one
ALONE = "alone"  # the mark of tests that need the device for themselves
FACTS = """
import importlib.util, json, sys, sysconfig
found = {"python": sys.version.split()[0], "missing": [
    name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]}
found["core_file"] = "_core" + sysconfig.get_config_var("EXT_SUFFIX")
found["core"] = "installed" if importlib.util.find_spec("quire._core") else "none"
try:
    import torch
    found["torch"] = torch.__version__
    found["gpus"] = torch.cuda.device_count()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found["device"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


class Stopped(Exception):
    """The user or the system requests the end of the run."""


@dataclass
class Signals:
    """Which signal came first. It is only noted, and acted on where nothing is half done."""

    received: str = ""

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = self.received or signal.Signals(number).name

    def check(self) -> None:
        """Raise Stopped if one came."""
        if self.received:
            raise Stopped(f"signal {self.received}")


@dataclass
class Check:
    """One part. folder: for all results; out: for the archive and the summary. stage: of a plan."""

    part: str
    options: argparse.Namespace
    folder: Path
    out: Path
    signals: Signals = field(default_factory=Signals)
    began: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    cut_off: str = ""
    stage: Stage | None = None
    text: str = ""  # the summary
    _tasks_of: dict[str, set[str]] = field(default_factory=dict)  # unfinished, by file of tests
    _num_passed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.name = self.stage.name if self.stage else self.part
        archive = f"gpu-check-{self.folder.name}" if self.stage else "gpu-check"
        self.archive = Archive(self.folder, self.out / f"{archive}.tar.gz")
        self.logs = self.folder / self.name
        self.runner = Runner(
            self.logs,
            self.began + self.options.budget_s,
            dict(os.environ),
            self._on_end,
            self._wait,
        )

    def _wait(self) -> None:
        self.signals.check()
        self.archive.refresh()

    def run(self) -> int:
        """Run the part; return the exit status."""
        for old in self.logs.glob("*.txt"):
            old.unlink()
        self._measured("summary.txt").unlink(missing_ok=True)
        try:
            self.facts = self._query_facts()
            if self._can_run():
                self._run_part()
        except Stopped as error:
            self.cut_off = f"this run was cut off: {error}"
        finally:
            self.runner.kill()
            self._finish()
        good = all(map(is_good, self.outcomes)) and not self.cut_off
        return 0 if good else 1

    # ---- what there is -----------------------------------------------------------------------

    @property
    def on_cpu(self) -> bool:
        return bool(self.options.device == "cpu")

    def _query_facts(self) -> dict[str, Any]:
        """Return facts about the given Python, from a process of its own. The carried packages are
        used only if one is missing, because they would hide installed ones."""
        environment = self.runner.environment
        environment["TRITON_INTERPRET"] = "1" if self.on_cpu else "0"
        given = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *given])
        facts = self._facts_of(environment)
        if set(facts.get("missing", ())) & {*NEEDED} and SITE.is_dir():
            environment["PYTHONPATH"] += os.pathsep + str(SITE)
            facts = self._facts_of(environment) | {"site": "build/gpu-site"}
        if facts.get("core") == "none" and (carried := CORE / facts["core_file"]).is_file():
            shutil.copy2(carried, PACKAGE)  # a module of a package is found only there
            facts["core"] = "build/gpu-site"
        return facts

    def _facts_of(self, environment: Mapping[str, str]) -> dict[str, Any]:
        command = (self.options.python, "-c", FACTS, *NEEDED, *USEFUL)
        text = self._answer("facts", "what this machine has", command, environment)
        for line in reversed(text.splitlines()):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        end = text.strip().splitlines()[-1:] or ["it printed nothing"]
        return {"error": f"{self.options.python} said: {end[0]}"}

    def _answer(
        self, name: str, about: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> str:
        """Return the output of a command, without the heading of its log."""
        end = min(self.runner.end, time.monotonic() + QUESTION_S)
        question = Runner(self.logs, end, dict(environment), on_wait=self._wait)
        task = Task(name, about, tuple(command))
        try:
            question.run([task])
        finally:
            question.kill()
        return tail(self.logs / f"{name}.txt", 1 << 22)

    @property
    def _num_gpus(self) -> int:
        return int(self.facts.get("gpus", 0))

    def _can_run(self) -> bool:
        missing, why = set(self.facts.get("missing", ())), ""
        lacking = [name for name in NEEDED if name in missing]
        if "torch" not in self.facts:
            why = f"there is no torch ({self.facts.get('error', 'not installed')})"
        elif not self.on_cpu and "device" not in self.facts:
            why = "torch sees no CUDA device"
        elif lacking:
            why = f"there is no {', '.join(lacking)} (`.ci/gpu-site` packs them, to carry along)"
        elif self.part in TESTED and "pytest" in missing:
            why = "there is no pytest"
        elif self.part != "models" and "triton" in missing:
            why = "there is no triton"
        elif self.part == "models" and self.on_cpu:
            why = "its tests compare a GPU with the CPU"
        elif self.part == "ranks" and (self.on_cpu or self._num_gpus < NUM_OF_RANKS):
            why = f"it needs {NUM_OF_RANKS} GPUs, and torch sees {self._num_gpus}"
        if why:
            self.skipped.append(f"all of {self.part}: {why}")
        return not why

    # ---- what is done ------------------------------------------------------------------------

    def _run_part(self) -> None:
        if self.part in TESTED:
            self._run_tests(self.part)
        elif self.part == "tools":
            self.runner.run(list(self._tool_tasks()))
        else:
            self.runner.run([self._bench_task()])

    def _tool_tasks(self) -> Iterator[Task]:
        """Yield the bounded cases under the tools that are there; without a GPU the cases alone."""
        for name, (line, piece) in TOOLS.items():
            tool = next(word for word in line.split() if word in ("ncu", "compute-sanitizer"))
            if not self.on_cpu and shutil.which(tool) is None:
                self.skipped.append(f"{name}: {tool} is not installed")
                continue
            sized = ["--tiny"] if self.on_cpu or tool != "ncu" else []
            command = [] if self.on_cpu else line.split()
            command += [self.options.python, "-m", "benchmarks.gpu", "--one", "--once", *sized]
            command += ["--device", self.options.device, "--part", "bench", "--pieces", piece]
            command += ["--out", str(self.folder / f"tools-{name}"), "--budget-s", str(CASES_S)]
            yield Task(name, f"the kernels of piece {piece}, once", tuple(command), TOOL_S)

    def _bench_task(self) -> Task:
        about = {
            "first": "whether the demo model, a 0.6B and an 8B answer right, and how fast",
            "bench": "limits, whole steps, attention and kernels beside the least times",
            "peers": "the same requests by quire and by other engines",
        }[self.part]
        left = self.runner.end - time.monotonic()
        command = [self.options.python, "-m", "benchmarks.gpu", "--part", self.part]
        command += ["--pieces", self.options.pieces, "--out", str(self.folder)]
        command += ["--budget-s", str(round(max(1.0, left - MARGIN_S), 1))]
        command += ["--device", "cpu", "--tiny"] if self.on_cpu else []
        return Task(self.part, about, tuple(command))

    def _run_tests(self, part: str) -> None:
        files = self._chosen_files(part)
        if not files:
            self.skipped.append(f"{self.name}: there are no such files of tests")
            return
        chosen = "gpu" if part in ON_GPU else "not gpu"
        counts, together, alone = self._count(files, chosen), list[Task](), list[Task]()
        for file in files:
            shards = min(-(-counts.get(file, 1) // TESTS_PER_PROCESS), self.options.jobs) or 1
            for shard in range(1, shards + 1):
                together.append(self._test_task(file, f"{chosen} and not {ALONE}", shard, shards))
            if f"mark.{ALONE}" in Path(file).read_text(encoding="utf-8", errors="replace"):
                alone.append(self._test_task(file, f"{chosen} and {ALONE}"))
        # Those alone come first: they are few, and what is together takes what time there is.
        self.runner.run(alone)
        self.runner.run(together, self.options.jobs)

    def _chosen_files(self, part: str) -> list[str]:
        """Return the files to run: the named files, or the changed or other files of a stage."""
        files: list[str] = self.options.tests or self._test_files(part)
        if self.stage is None or not self.stage.only:
            return files
        passed, is_changed = self._passed(), self.stage.only == CHANGED
        return [file for file in files if passed.has_changed(file) == is_changed]

    def _passed(self) -> Passed:
        device = str(self.facts.get("device", "cpu")).partition(",")[0]
        return Passed(
            device, (FILE, self.folder.parent / "passed.json", self.folder / "passed.json")
        )

    def _test_files(self, part: str) -> list[str]:
        """Return the test files; a file that compiles without the device comes last."""
        files = (path for folder in TESTED[part] for path in (ROOT / folder).glob("test_*"))
        found = sorted(str(path.relative_to(ROOT)) for path in files)
        return sorted(found, key=lambda file: file.endswith("test_aot.py"))

    def _test_task(self, file: str, mark: str, shard: int = 1, shards: int = 1) -> Task:
        name = Path(file).stem.removeprefix("test_")
        name += f"-{shard}of{shards}" if shards > 1 else ""
        name += f"-{ALONE}" if mark.endswith(f"and {ALONE}") else ""
        command = [self.options.python, "-m", "pytest", "-q", "--tb=short", "--color=no"]
        command += ["-p", "no:cacheprovider", "-m", mark, file]
        command += [f"--shard={shard}/{shards}"] if shards > 1 else []
        self._tasks_of.setdefault(file, set()).add(name)
        return Task(name, about_file(ROOT / file), tuple(command))

    def _count(self, files: Sequence[str], mark: str) -> Counter[str]:
        """Count tests by file. An uncollectable file counts none, and fails when it runs."""
        command = (self.options.python, "-m", "pytest", "-q", "--collect-only", "--color=no")
        command += ("-p", "no:cacheprovider", "-m", mark, *files)
        text = self._answer("collected", "which tests there are", command, self.runner.environment)
        return Counter(line.split("::")[0] for line in text.splitlines() if "::" in line)

    def _on_end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(line_of(outcome)[:200], flush=True)
        for file, names in self._tasks_of.items():
            if outcome.task.name in names and is_good(outcome):
                names.remove(outcome.task.name)
                self._num_passed[file] += num_passed(outcome)
                if not names and self._num_passed[file] and not self.on_cpu:
                    self._passed().add(file, self._num_passed[file])

    # ---- what is left behind -----------------------------------------------------------------

    def _measured(self, suffix: str) -> Path:
        """Return the path of a file that the benchmarks write."""
        return self.folder / f"gpu_{self.part}.{suffix}"

    def _finish(self) -> None:
        self.text = text = "\n".join(self._summary()) + "\n"
        self.out.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / f"summary-{self.name}.txt", self.out / "gpu-check.txt"):
            path.write_text(text, encoding="utf-8")
        self.archive.write()
        print(f"\n{text}", end="", flush=True)

    def _summary(self) -> list[str]:
        took = time.monotonic() - self.began
        names = ("device", "torch", "python", "site", "core", "error")
        facts = ", ".join(f"{name} {self.facts[name]}" for name in names if name in self.facts)
        bad = sum(not is_good(each) for each in self.outcomes)
        count = (
            f"{len(self.outcomes) - bad} right, {bad} failed" if self.outcomes else "nothing ran"
        )
        head = [f"== gpu-check {self.name}: {count}, {took:.0f} s", facts or "nothing is known"]
        head += ["tiny sizes, on the CPU: no figure means anything"] if self.on_cpu else []
        head += [f"CUT OFF  {self.cut_off}"] if self.cut_off else []
        body = [f"skipped  {each}" for each in self.skipped]
        try:
            lines = self._measured("summary.txt").read_text(encoding="utf-8").splitlines()
            lines += [line_of(each) for each in self.outcomes if not is_good(each)]
        except OSError:
            lines = [line_of(each) for each in self.outcomes]
        body += by_importance(lines)
        missing = [name for name in self.facts.get("missing", ()) if name in USEFUL]
        foot = [f"not there: {', '.join(missing)}"] if missing else []
        rest = " ".join(name for name in PARTS if name != self.part)
        foot += [f"all of it: {self.archive.path}; not asked for now: {rest}"]
        return fitted(head, body, foot)


def carried_core() -> str:
    """Return which C++ core, for --native-launch, goes to a machine that has none."""
    found = sorted(path.name for path in CORE.glob("_core.*"))
    if not found:
        return "C++ core: none to carry; `make gpu-site` builds it"
    return f"C++ core: {', '.join(found)} in build/gpu-site/core, for tests with --native-launch"


def num_passed(outcome: Outcome) -> int:
    """Return how many tests passed, by pytest's last line."""
    found = re.findall(r"\b(\d+) passed", tail(outcome.log))
    return int(found[-1]) if found else 0


def about_file(path: Path) -> str:
    """Return the first sentence of a file of tests."""
    try:
        lines = path.read_text(encoding="utf-8").split('"""')[1].strip().splitlines()
    except (OSError, IndexError):
        return path.name
    return lines[0]


def parser() -> argparse.ArgumentParser:
    environ = os.environ
    made = argparse.ArgumentParser(
        prog=".ci/gpu-check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    part = environ.get("PART") or "first"
    made.add_argument("part", nargs="?", default=part, help="or PART, in the environment")
    made.add_argument("--budget-s", type=float, default=float(environ.get("BUDGET_S") or 480))
    made.add_argument("--jobs", type=int, default=int(environ.get("JOBS") or default_jobs()))
    made.add_argument("--pieces", default=environ.get("PIECES") or "", help="only these, by name")
    made.add_argument("--tests", nargs="*", default=[], help="only these files of tests")
    made.add_argument("--device", choices=("cuda", "cpu"), default=environ.get("DEVICE") or "cuda")
    made.add_argument("--python", default=environ.get("PYTHON") or sys.executable)
    made.add_argument("--plan", choices=("", *PLANS), default=environ.get("PLAN") or "")
    made.add_argument("--call", type=int, default=int(environ.get("CALL") or 0), help="of a plan")
    made.add_argument("--dry", action="store_true", default=bool(environ.get("DRY")))
    made.add_argument("--results", type=Path, default=ROOT / "build" / "gpu-check")
    made.add_argument("--out", type=Path, default=Path(environ.get("OUT") or ROOT / "build"))
    return made


def default_jobs() -> int:
    return min(MAX_JOBS, max(1, (os.cpu_count() or 2) - 2))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.part not in (*PARTS, "all"):
        known = ", ".join((*PARTS, "all"))
        print(f"PART must be one of {known}, got {options.part!r}.", file=sys.stderr)
        return 2
    os.chdir(ROOT)

    signals = Signals()
    signals.listen()
    status, results, out = 0, options.results.resolve(), options.out.resolve()
    if options.plan:
        return run_plan(options, results, out, signals)
    for part in PARTS if options.part == "all" else (options.part,):
        check = Check(part, options, results, out, signals)
        status = max(status, check.run())
        if check.cut_off:
            break
    return status


def run_plan(options: argparse.Namespace, results: Path, out: Path, signals: Signals) -> int:
    """Run a plan's calls, or one of them; return the exit status. Each has a folder and an archive,
    which is renewed during each stage."""
    if options.dry:
        print("\n".join(described(options.plan)))
        print(carried_core())
        return 0
    calls = PLANS[options.plan]
    if not 0 <= options.call <= len(calls):
        print(f"CALL must be 1 to {len(calls)}, got {options.call}.", file=sys.stderr)
        return 2
    status, texts = 0, list[str]()
    for number in [options.call] if options.call else range(1, len(calls) + 1):
        end = time.monotonic() + MAX_CALL_S
        for stage in calls[number - 1].stages:
            given = argparse.Namespace(**vars(options))
            given.budget_s = min(stage.budget_s, max(1.0, end - time.monotonic()))
            given.pieces, given.tests = stage.pieces, []
            folder = results / f"call-{number}"
            check = Check(stage.part, given, folder, out, signals, stage=stage)
            status = max(status, check.run())
            texts.append(check.text)
            (out / "gpu-check.txt").write_text("\n".join(texts), encoding="utf-8")
            if check.cut_off:
                return status
    return status


if __name__ == "__main__":
    sys.exit(main())

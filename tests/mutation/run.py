"""`make mutate`: small mistakes in the scheduler, the KV room and the sampler, for tests to see.

    python -m tests.mutation.run [--num 300] [--seed 0] [--only TEXT] [--output-json FILE]

The tests are collected once, and run once to see which of them call which functions. Then each
mutant of a sample runs in a fork of this process, which replaces the right function. The fork runs
tests that call it until one fails or does not end: the mutant is killed. Tests that have killed
many mutants in little time run first. A mutant that lives for --budget seconds of processor time
has survived. The sample depends on nothing but the seed and the code. Equivalent mutants are listed
with the reason in equivalent.txt; they do not count.

The published tools do not sample, and start a process with torch for each mutant.
"""

import argparse
import ast
import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

from benchmarks.result_files import write
from tests.mutation.mutants import FUNCTIONS, Mutant, mutants_of, sample

ROOT = Path(__file__).parents[2]
SOURCES = (
    "src/quire/scheduler/*.py", "src/quire/scheduler/*/*.py", "src/quire/kv/*.py",
    "src/quire/spec/cache_group.py",
    "src/quire/ops/sampling*.py", "src/quire/runner/sampling/sampler.py",
    "src/quire/runner/sampling/candidates.py",
)  # fmt: skip
TESTS = (
    "tests/golden", "tests/scheduler", "tests/kv", "tests/spec/test_cache_group.py",
    "tests/ops/test_sampling.py",
    "tests/ops/test_sampling_bounds.py",
    "tests/runner/test_sampler.py", "tests/runner/test_memory_plan.py",
    "tests/engine/loop/test_beams.py",
    "tests/engine/loop/test_groups.py", "tests/engine/loop/test_swap.py",
    "tests/engine/client/test_sample.py", "tests/engine/loop/test_bisect.py",
    "tests/engine/loop/test_core.py", "tests/engine/loop/test_figure_9.py",
    "tests/engine/loop/test_open_prompts.py", "tests/engine/attachments/test_queue_limit.py",
    "tests/engine/observability/test_timeline.py", "tests/engine/observability/test_metrics.py",
    "tests/engine/attachments/test_held_files.py", "tests/engine/attachments/test_kv_events.py",
    "tests/engine/connectors/test_store.py",
)  # fmt: skip
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
MIN_SCORE = 0.97
MAX_SLOWDOWN = 4  # times that a test may take as long as it does without a mutant
MAX_WAIT_S = 900.0  # for a mutant that waits for something
EXTRA_BYTES = 6 << 30  # address space that a mutant may take beyond what there is
SURVIVED, KILLED, BROKEN = 0, 1, 2  # what a fork ends with

settings.register_profile(
    "mutation", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)


def all_mutants() -> list[Mutant]:
    paths = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return [
        mutant
        for path in paths
        for mutant in mutants_of(path.relative_to(ROOT), path.read_text("utf-8"))
    ]


def equivalents() -> dict[str, str]:
    """Names of mutants that change nothing that matters, each with the reason: pairs of lines."""
    lines = EQUIVALENT.read_text("utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    return dict(zip(lines[::2], (reason.strip() for reason in lines[1::2]), strict=True))


# ---- a mutant in place -----------------------------------------------------------------------


def name_of(code: CodeType) -> str | None:
    """ "path Class.function" of our own code; what is defined in a function counts as that."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT / "src"):
        return None
    return f"{path.relative_to(ROOT).as_posix()} {code.co_qualname.partition('.<locals>')[0]}"


def all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from all_codes(part)


def _keep_class(tree: ast.Module, function: str) -> None:
    """Let a method whose super() was left out refer to its class still: code can only replace code
    with as many free variables."""
    *classes, name = function.split(".")
    body = tree.body
    for each in classes:
        [owner] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == each]
        body = owner.body
    [method] = [node for node in body if isinstance(node, FUNCTIONS) and node.name == name]
    method.body.append(ast.Expr(ast.Name("__class__", ast.Load())))
    ast.fix_missing_locations(tree)


def put_in_place(mutant: Mutant) -> None:
    """Give the function, wherever it is known, the changed code."""
    path = ROOT / mutant.path
    tree = mutant.tree(path.read_text("utf-8"))
    if "super()" in mutant.before and "super()" not in mutant.after:
        _keep_class(tree, mutant.function)
    made = compile(tree, str(path), "exec")
    codes = {(c.co_qualname, c.co_firstlineno): c for c in all_codes(made)}
    gc.unfreeze()  # tests/conftest.py hides from the collector what was there before the tests
    functions = [
        found
        for found in gc.get_objects()
        if type(found) is FunctionType  # isinstance() would follow a weak proxy, perhaps to nothing
        and found.__code__.co_qualname == mutant.function
        and Path(found.__code__.co_filename) == path
    ]
    assert functions, f"{mutant.function} was not found"
    for function in functions:
        old = function.__code__
        function.__code__ = codes[old.co_qualname, old.co_firstlineno]


# ---- running tests ---------------------------------------------------------------------------


@dataclass
class Calls:
    """What the tests call, as they are: by test, and how long each takes."""

    called: dict[str, list[str]] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)

    def take(self, item: pytest.Item) -> None:
        codes: set[CodeType] = set()

        def see(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                codes.add(frame.f_code)

        began_s = time.process_time()
        threading.setprofile(see)
        sys.setprofile(see)
        run_item(item)
        sys.setprofile(None)
        threading.setprofile(None)
        self.durations[item.nodeid] = time.process_time() - began_s
        self.called[item.nodeid] = sorted({n for code in list(codes) if (n := name_of(code))})

    def of(self, mutant: Mutant, kills: Counter[str]) -> list[str]:
        """The tests that call its function; those first that cost little and kill much, and one of
        each test function before its other parameters."""
        name = f"{mutant.path.as_posix()} {mutant.function}"
        users = [test for test, called in self.called.items() if name in called]
        users.sort(key=self.durations.__getitem__)
        num, costs = Counter[str](), {}
        for test in users:
            kind = test.partition("[")[0]
            num[kind] += 1
            costs[test] = (self.durations[test] + 0.02) * num[kind] / (1 + 3 * kills[test]) ** 2
        return sorted(users, key=costs.__getitem__)


def run_item(item: pytest.Item) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def in_child(work: Callable[[int], int], limit_s: float) -> tuple[int, str]:
    """Call work in a fork of this process, with a pipe's end to write to: how it ended, and what it
    wrote. Whoever takes longer than limit_s is killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            os.setpgid(0, 0)
            status = work(writes)
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}"[:500].encode())
        finally:
            os._exit(status)
    os.close(writes)
    os.set_blocking(reads, False)
    until_s, said, is_over = time.monotonic() + limit_s, b"", False
    while not is_over and time.monotonic() < until_s:
        ready, _, _ = select.select([reads], [], [], 1.0)
        piece = os.read(reads, 1 << 16) if ready else None
        said, is_over = said + (piece or b""), piece == b""
    os.close(reads)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL) if not is_over else None
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return (KILLED if code < 0 else code), said.decode()


class Run:
    """A pytest plugin: instead of running the tests it runs the mutants."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.failed = False  # a test of this process
        self.items: dict[str, pytest.Item] = {}
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        calls, kills = self._calls(), Counter[str]()
        began_s = time.monotonic()
        for mutant in self._chosen():
            tests = calls.of(mutant, kills)
            how, by = ("is never called", "")
            if tests:
                how, by = self._judge(mutant, tests, calls.durations)
            kills[by] += how == "killed"
            self.counts[how] += 1
            if how != "killed" or self.given.verbose:
                self._tell(mutant, f"{how} {by}")
        total = self.counts.total()
        share = self.counts["killed"] / max(1, total)
        took_s = time.monotonic() - began_s
        self._say(
            f"{self.counts['killed']} of {total} mutants killed: {share:.1%} ({took_s:,.0f} s)"
        )
        seen = self.counts["killed"]
        row = {"num_mutations": total, "num_seen": seen, "share": share, "aim": MIN_SCORE}
        write(self.given.output_json, "mutation", [row], {"seed": self.given.seed})
        session.testsfailed = int(share < MIN_SCORE)
        return True

    def _chosen(self) -> list[Mutant]:
        mutants, same = all_mutants(), equivalents()
        for name in sorted(same.keys() - {mutant.name for mutant in mutants}):
            self._say(f"equivalent.txt: there is no such mutant any more: {name}")
        candidates = (mutant for mutant in mutants if mutant.name not in same)
        chosen = sample(candidates, self.given.num, self.given.seed)
        return [mutant for mutant in chosen if self.given.only in mutant.name]

    def _calls(self) -> Calls:
        """From the file, and of a run now of the tests that it does not have."""
        path, calls = self.given.profile, Calls()
        if path is not None and path.exists():
            calls = Calls(**json.loads(path.read_text()))
            for known in calls.called, calls.durations:
                for test in known.keys() - self.items.keys():
                    del known[test]

        def work(pipe: int) -> int:
            for item in self.items.values():
                if item.nodeid not in calls.called:
                    calls.take(item)
                assert not self.failed, f"{item.nodeid} fails as it is; mend that first"
            with open(pipe, "w", encoding="utf-8") as file:
                json.dump(vars(calls), file)
            return 0

        if self.items.keys() > calls.called.keys():
            status, said = in_child(work, 3600)
            assert status == 0, said
            calls = Calls(**json.loads(said))
        if path is not None:
            path.write_text(json.dumps(vars(calls)))
        return calls

    def _judge(
        self, mutant: Mutant, tests: list[str], durations: dict[str, float]
    ) -> tuple[str, str]:
        """What becomes of it, and through which test."""

        def work(pipe: int) -> int:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, used + EXTRA_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            settings.load_profile("mutation")
            put_in_place(mutant)
            began_s = time.process_time()
            for test in tests:
                run_item(self.items[test])
                if self.failed:
                    os.write(pipe, test.encode())
                    return KILLED
                if time.process_time() - began_s > self.given.budget:
                    break
            return SURVIVED

        longest_s = max(durations[test] for test in tests)
        limit_s = int(self.given.budget + MAX_SLOWDOWN * longest_s + 5 + time.process_time())
        status, by = in_child(work, MAX_WAIT_S)
        return {SURVIVED: "survived", KILLED: "killed"}.get(status, "could not be made"), by

    def _tell(self, mutant: Mutant, how: str) -> None:
        self._say(f"{mutant.path}:{mutant.line} in {mutant.function} {how}")
        self._say(f"  - {mutant.before}\n  + {mutant.after}")

    def _say(self, text: str) -> None:
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.mutation.run")
    parser.add_argument("--num", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--budget", type=float, default=20, help="seconds for each (20)")
    parser.add_argument("--only", default="", help="of the sample, those with this in their name")
    parser.add_argument("--profile", type=Path, help="what the tests call; made if it is not there")
    parser.add_argument("--output-json", type=Path, help="a result file (benchmarks/results)")
    parser.add_argument("--verbose", action="store_true", help="tell also what killed the others")
    given = parser.parse_args()
    os.chdir(ROOT)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    return int(pytest.main([*options, *TESTS], plugins=[Run(given)]))


if __name__ == "__main__":
    sys.exit(main())

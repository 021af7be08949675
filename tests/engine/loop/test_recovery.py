"""Step failures of every kind and at every place, in a small engine with a real model.

Random programs send requests of all kinds to a tight pool with a host tier and swaps in both
directions. The next fault goes to the least covered cell of the table of kinds and places. At the
end no cell may be empty. A random fault fails no request; a fault that a request causes fails that
request.

Covers `runner/steps.py`.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from quire.base.clock import FakeClock
from quire.base.masks import MaskPromise
from quire.base.messages import Abort, Append, Request, Unpin
from quire.base.plan import Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import config_from_flat
from quire.base.step_outputs import SequenceUpdate
from quire.engine.client.output import StepReader
from quire.engine.executors.executor import Executor, InProcessExecutor
from quire.engine.loop.core import EngineCore
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint.source import resolve_model
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from tests.support.cases import slow_but
from tests.support.engine.failing_core import prompt
from tests.support.engine.updates import read, run_to_end
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

MAX_LEN = 48
GUILTY = 1000  # the seed of a request that makes steps with its prompt fail
GUILTY_LATER = 1001  # the seed of one that fails from its second output token on
PLACES = ("begin", "tables", "forward", "after forward", "sampling", "result", "counters")
MOVES = ("swap_out", "load", "copy")
KINDS = (  # the rarest first
    "forks", "pieces", "pins", "beams", "scored", "load", "swap_out", "copy", "prompts", "outputs"
)  # fmt: skip
Cell = tuple[str, str]


class StepFault(Exception):
    pass


Point = tuple[Any, str, str, bool]  # an object, its method, the place, whether after it


def points_of(runner: Any) -> list[Point]:
    """Return the points of a step at which a fault can be raised. No point follows the counters, so
    a step that samples no token fails just before them."""
    last = [(runner.rows.ops, "advance", place, False) for place in PLACES[4:]]
    return [
        (runner, "follow", "begin", False),
        (runner.rows, "_add_rest", "tables", True),
        (runner.backend, "prepare", "forward", False),
        (runner.backend, "swap_out", "swap_out", True),
        (runner.backend, "load", "load", True),
        (runner.backend, "copy_blocks", "copy", True),
        (runner, "finish", "after forward", False),
        (runner.rows.ops, "choose", "sampling", True),
        (runner.sampler, "sample", "result", True),
        *last,
    ]


class Faults:
    """A runner that raises at one place of a step.

    Without `place`, the first run of a step fails at the place with the fewest faults in the table.
    Otherwise each plan with a row of a guilty request fails at `place`.
    """

    def __init__(self, runner: Any, table: Counter[Cell], place: str | None) -> None:
        self.runner = runner
        self.table = table
        self.place = place
        self.pins: set[int] = set()  # seeds of prefixes to pin
        self.places = PLACES
        self.num_raised = 0
        self.suspects: Any = ()  # planned alone, and guilty if that plan fails
        self._seeds: dict[int, tuple[int, bool]] = {}  # by row: request seed, is scored
        self._prompt_lens: dict[int, int] = {}
        self.moved: set[int] = set()  # seeds of requests with a move of that kind
        self._now: str | None = None
        self._last_step, self._last_fault = -1, -2
        self._install()

    def _install(self) -> None:
        runner = self.runner
        for owner, name, place, is_after in points_of(runner):
            setattr(owner, name, self._with_fault(getattr(owner, name), place, is_after))

    def _with_fault(
        self, call: Callable[..., Any], place: str, is_after: bool
    ) -> Callable[..., Any]:
        def carry_out(*args: Any, **kwargs: Any) -> Any:
            if is_after:
                result = call(*args, **kwargs)
            if self._now == place:
                self.num_raised += 1
                raise StepFault(place)
            return result if is_after else call(*args, **kwargs)

        return carry_out

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        result: StepResult = self._do(self.runner.run, plan)
        return result

    def launch(self, plan: Plan, masks: MaskPromise | None = None) -> Any:
        return self._do(self.runner.launch, plan)

    def idle(self) -> bool:
        return False

    def _do(self, carry_out: Callable[[Plan], Any], plan: Plan) -> Any:
        for start in plan.started:
            self._seeds[start.row] = start.seed, start.params.prompt_logprobs is not None
            self._prompt_lens[start.row] = start.num_prompt_tokens
        for fork in plan.forked:
            self._seeds[fork.child] = self._seeds[fork.parent]
            self._prompt_lens[fork.child] = self._prompt_lens[fork.parent]
        self._now = self._choose(plan) if self.place is None else self._place_of_guilty(plan)
        try:
            return carry_out(plan)
        except StepFault as fault:
            for kind in self.kinds_of(plan):
                self.table[kind, str(fault)] += 1
            raise
        finally:
            self._now = None

    def _place_of_guilty(self, plan: Plan) -> str | None:
        if self.place in MOVES:
            self._note_moved(plan)
            return self.place
        ends = (plan.computed_bound + plan.num_tokens).tolist()
        for row, end in zip(plan.rows.tolist(), ends, strict=True):
            seed = self._seeds[row][0]
            if seed == GUILTY or (seed == GUILTY_LATER and end > self._prompt_lens[row] + 1):
                return self.place
        return None

    def _note_moved(self, plan: Plan) -> None:
        writes = plan.block_writes
        for move in plan.moves:
            if move.kind == self.place:
                here = np.isin(writes.block_id, move.destination) & (writes.group == move.group)
                self.moved |= {self._seeds[row][0] for row in writes.row[here].tolist()}

    def _choose(self, plan: Plan) -> str | None:
        is_first, self._last_step = plan.step_id != self._last_step, plan.step_id
        if not is_first or not len(plan.rows) or len(self.suspects):
            return None
        moves = {move.kind for move in plan.moves}
        cells = [
            (self.table[kind, place], KINDS.index(kind), i, place)
            for kind in self.kinds_of(plan)
            for i, place in enumerate((*self.places, *MOVES))
            if place in self.places or place in moves
        ]
        least = min(cells)
        if least[0] and plan.step_id < self._last_fault + 2:
            return None  # at most every other step fails, unless its cell is still empty
        self._last_fault = plan.step_id
        return least[3]

    def kinds_of(self, plan: Plan) -> list[str]:
        rows = plan.rows.tolist()
        sampling = set(plan.sample_rows.tolist())
        found = {move.kind for move in plan.moves}
        if set(rows) - sampling:
            found.add("prompts")
        if sampling & set(rows):
            found.add("outputs")
        if plan.new_forks:
            found.add("forks")
        if len(plan.forked) > len(plan.new_forks):
            found.add("beams")
        if any(host.is_prompt for host in plan.host_tokens):
            found.add("pieces")
        if any(self._seeds[row][0] in self.pins for row in rows):
            found.add("pins")
        if any(self._seeds[row][1] for row in rows):
            found.add("scored")
        return [kind for kind in KINDS if kind in found]


class Engine:
    """A core over a tiny model with faults, and the outputs of its requests."""

    def __init__(
        self, depth: int, num_blocks: int = 14, architecture: str = "llama", **more: Any
    ) -> None:
        folder = checkpoint(architecture)
        settings: dict[str, Any] = {
            "model": str(folder), "dtype": "float64", "block_size": 4, "max_model_len": MAX_LEN,
            "attention_backend": "torch", "scheduling_policy": "fifo", "max_num_seqs": 8,
            "max_num_batched_tokens": 11, "watermark": 0.0, "preemption_mode": "swap",
            "kv_cache_memory_bytes": pool_bytes(folder, num_blocks, 4), "kv_host_gb": 1e-4,
            "pipeline_depth": depth,
        } | more  # fmt: skip
        source = resolve_model(str(folder))
        self.built = build_runner(config_from_flat(**settings), source)
        self.source = source
        self.core: EngineCore
        self.faults: Faults | None = None
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        self.beams: dict[str, list[list[int]]] = {}
        self.ends: dict[str, set[str]] = {}
        self.reader = StepReader()

    def start(
        self,
        table: Counter[Cell] | None = None,
        place: str | None = None,
        make_executor: Callable[[BuiltRunner], Executor] = InProcessExecutor,
    ) -> "Engine":
        built = self.built
        if table is not None:
            self.faults = Faults(built.runner, table, place)
            built = dataclasses.replace(built, runner=self.faults)  # type: ignore[arg-type]
        limits = RequestLimits(97, MAX_LEN, 20, 1 << 20)
        scheduler = make_scheduler(built, self.source)
        self.core = EngineCore(scheduler, make_executor(built), FakeClock(), limits)
        if self.faults is not None:
            self.faults.suspects = scheduler.lifecycle.suspects.until
        return self

    def add(self, request: Request) -> None:
        if request.pin_s is not None and self.faults is not None:
            self.faults.pins.add(request.seed)
        self.core.add(request)
        self.ends[request.request_id] = set()

    def step(self) -> None:
        self.take(read(self.reader, self.core.step()))
        self.core.scheduler.check_invariants()

    def take(self, outputs: list[SequenceUpdate]) -> None:
        for output in outputs:
            name = output.request_id
            mine = self.tokens.setdefault((name, output.index), [])
            mine += output.token_ids
            found = self.scores.setdefault(name, [])
            found += [float(c.logprobs[0]) for c in output.prompt_candidates or []]
            if output.beams is not None:
                self.beams[name] = [beam.token_ids for beam in output.beams]
            if output.finish is not None:
                self.ends[name].add(output.finish.reason)

    def finish(self) -> None:
        run_to_end(self.core, self.step)


def request(name: str, tokens: list[int], seed: int, **params: Any) -> Request:
    more = {key: params.pop(key) for key in ("pin_s", "is_open", "timeout_s") if key in params}
    params = {"temperature": 0.0, "ignore_eos": True} | params
    return Request(name, tokens, SamplingParams(**params), seed=seed, **more)


def run_program(engine: Engine, seed: int, has_guilty: bool) -> None:
    """Run requests of all kinds, prompt pieces, an abort and a timeout until all have ended."""
    rng = random.Random(seed)
    shared = prompt(seed, 14)
    engine.add(request("pin", shared[:10], 1, max_tokens=1, pin_s=0.0))
    engine.add(request("pieces", prompt(seed + 1, 6), 2, max_tokens=6, is_open=True))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9}, {"n": 2, "temperature": 0.9}, {"n": 2, "use_beam_search": True},
        {"prompt_logprobs": 0}, {"n": 2, "temperature": 0.7},
    ]  # fmt: skip
    for i in range(10):
        tokens = [*shared[: rng.choice([0, 7, 10, 14])], *prompt(100 * seed + i, rng.randint(2, 9))]
        kind = dict(kinds[i % len(kinds)])
        is_guilty = has_guilty and i in (2, 6)
        number = (GUILTY_LATER if i == 2 else GUILTY) if is_guilty else 10 + i
        engine.add(
            request(
                f"r{i}",
                tokens,
                number,
                max_tokens=min(rng.randint(3, 12), 31 - len(tokens)),
                **kind,
            )
        )
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if i in (1, 2, 3, 4, 5):
            engine.core.control(Append("pieces", prompt(seed + i, 3), is_last=i == 5))
        if i == 7:
            engine.add(request("gone", prompt(seed, 9), 3, max_tokens=9))
            engine.add(request("late", prompt(seed, 12), 4, max_tokens=20, timeout_s=1.0))
            engine.step()
            engine.core.control(Abort("gone"))
            engine.core._clock.advance(5.0)  # type: ignore[attr-defined]
    engine.finish()
    engine.core.control(Unpin("pin"))
    engine.add(request("after", prompt(seed, 20), 5, max_tokens=4))
    engine.finish()


def assert_same(engine: Engine, wanted: Engine, guilty: set[str]) -> None:
    failed = {name for name, ends in engine.ends.items() if "error" in ends}
    assert failed == guilty
    assert engine.ends["late"] == {"timeout"} and engine.ends["pin"] == {"pinned"}
    for name in engine.ends.keys() - guilty - {"gone", "late"}:
        mine = {key: value for key, value in engine.tokens.items() if key[0] == name}
        assert mine == {key: value for key, value in wanted.tokens.items() if key[0] == name}, name
        assert engine.beams.get(name) == wanted.beams.get(name), name
        assert engine.scores.get(name) == pytest.approx(wanted.scores.get(name)), name
    kv = engine.core.scheduler.memory.kv
    assert all(pool.num_used == 0 for pool in (*kv.pools, *kv.host_pools)), "blocks leak"


SEEDS = {"pin": 1, "pieces": 2, "gone": 3, "late": 4, "after": 5}
SEEDS |= {f"r{i}": 10 + i for i in range(10)}


@cache
def wanted(seed: int, architecture: str = "llama") -> Engine:
    """Run the same program without faults in a large pool."""
    engine = Engine(1, 200, architecture, kv_host_gb=0.0).start()
    run_program(engine, seed, has_guilty=False)
    return engine


@pytest.mark.parametrize(
    ("depth", "num_programs"),
    [(2, 2), *(pytest.param(depth, 12, marks=pytest.mark.slow) for depth in (1, 2, 3))],
)
def test_random_faults_fail_no_request(depth: int, num_programs: int) -> None:
    """Run two programs, or as many as it takes to cover every kind of step and every place."""
    table: Counter[Cell] = Counter()
    for seed in range(num_programs):
        engine = Engine(depth).start(table)
        run_program(engine, seed, has_guilty=False)
        assert_same(engine, wanted(seed), set())
        if not empty_cells(table):
            break
    if num_programs > 2:
        assert not empty_cells(table), "some cells of the table had no fault"
    assert sum(table.values()) > 20


def empty_cells(table: Counter[Cell]) -> list[Cell]:
    rows = [(kind, place) for kind in KINDS for place in PLACES]
    own = [(place, place) for place in MOVES]
    return [cell for cell in rows + own if not table[cell]]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_more_random_faults_fail_no_request(depth: int) -> None:
    for seed in range(20, 60):
        engine = Engine(depth, num_blocks=14 + seed % 5).start(Counter())
        run_program(engine, seed, has_guilty=False)
        assert_same(engine, wanted(seed), set())


@pytest.mark.parametrize(
    ("place", "depth"),
    [
        ("forward", 3),
        *(
            pytest.param(place, depth, marks=[] if place == "result" else pytest.mark.slow)
            for place, depth in zip(PLACES, cycle((3, 2, 1)), strict=False)
        ),
    ],
)
def test_guilty_request_fails_alone(place: str, depth: int) -> None:
    run_guilty(place, depth, depth)


@pytest.mark.parametrize(
    ("place", "depth"),
    [
        pytest.param(place, depth, marks=[] if place == "sampling" else pytest.mark.slow)
        for i, (place, depth) in enumerate(zip(PLACES, cycle((2, 3, 1)), strict=False))
    ],
)
def test_guilty_request_fails_alone_with_stateful_layers(place: str, depth: int) -> None:
    """The engine finds it by planning requests alone, because such steps are never repeated."""
    run_guilty(place, depth, depth, "qwen3_5_text")


@pytest.mark.parametrize(
    ("depth", "num_programs", "architecture"),
    [
        (3, 1, "qwen3_5_text"),  # two layers; the other has four
        *((depth, 2, "qwen3_5") for depth in (1, 2, 3)),
    ],
)
@pytest.mark.slow
def test_random_faults_fail_no_request_with_stateful_layers(
    depth: int, num_programs: int, architecture: str
) -> None:
    table: Counter[Cell] = Counter()
    for seed in range(num_programs):
        engine = Engine(depth, architecture=architecture).start(table)
        run_program(engine, seed, has_guilty=False)
        assert_same(engine, wanted(seed, architecture), set())
    assert sum(table.values()) > 10 * num_programs


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_more_guilty_requests_fail_alone(place: str, depth: int) -> None:
    for seed in range(20, 30):
        run_guilty(place, depth, seed)


def run_guilty(place: str, depth: int, seed: int, architecture: str = "llama") -> None:
    engine = Engine(depth, architecture=architecture).start(Counter(), place)
    run_program(engine, seed, has_guilty=True)
    assert_same(engine, wanted(seed, architecture), {"r2", "r6"})
    assert engine.faults is not None and engine.faults.num_raised > 0


@pytest.mark.parametrize("depth", slow_but((1, 2, 3), 2))
def test_failed_swap_out_falls_back_to_recompute(depth: int) -> None:
    """The rows of the failing step are not suspects."""
    engine = Engine(depth).start(Counter(), "swap_out")
    run_program(engine, depth, has_guilty=False)
    assert engine.faults is not None and engine.faults.num_raised > 0
    assert_same(engine, wanted(depth), set())


@pytest.mark.parametrize(
    ("place", "depth"),
    [
        ("copy", 2),
        ("load", 3),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("load", 1), ("copy", 1), ("load", 2), ("copy", 3))
        ),
    ],
)
def test_failed_block_move_fails_only_the_requests_it_serves(depth: int, place: str) -> None:
    engine = Engine(depth).start(Counter(), place)
    run_program(engine, depth, has_guilty=False)
    assert engine.faults is not None and engine.faults.num_raised > 0
    failed = {name for name, ends in engine.ends.items() if "error" in ends}
    assert failed and failed <= {
        name for name, seed in SEEDS.items() if seed in engine.faults.moved
    }
    assert_same(engine, wanted(depth), failed)

"""The thesis's table 4.1 on a real engine: its eight rows, alone, in pairs and all at once.

In each run one request does everything that its rows say, and gets the tokens of a plain engine.
Two pairs need a second request. One joins a whole prompt in one step with a chunked one. The other
joins a prompt in pieces with a handover. Counters and events of the run show that every row
occurred, so that no pair passes without both. The handover is between two engines over shared
memory. The first one keeps the prompt's blocks as soon as they are computed, and its answer's
params go to the second.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import msgspec
import pytest

from quire.base.events import Admitted, Appended, Event, Preempted, Stepped
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.base.settings.kv_transfer import KVTransfer, transfer_of
from quire.engine.drafting.draft_pace import StepTimes
from quire.engine.start.build import Engine, build_engine
from quire.render.renderer import RenderedPrompt
from tests.support.cases import slow_but
from tests.support.engine.attachments import stores_of
from tests.support.engine.shared_store import shared_store
from tests.support.models.reference_checkpoints import pool_bytes, text_checkpoint

PREFILL, DECODE, PREEMPTION, CHUNKED, STREAMING, CACHING, HANDED_OVER, GUESSING = ROWS = (
    "prefill", "decode", "preemption", "chunked prefills", "streaming prefills", "prefix caching",
    "prefill disaggregation", "speculative decoding",
)  # fmt: skip
BLOCK = 4
PATTERN = [11, 12, 13, 14, 15, 16, 17, 18]
PROMPT = [*PATTERN, 21, 22, 23, *PATTERN, 31, 32, 33, 34, *PATTERN, 41]
NEIGHBOUR = [61, 62, 63, 64, 65, 66]
BULLY = list(range(100, 136))
NUM_PIECE = 20  # tokens of the prompt that come first
NUM_SHARED = 17  # that somebody asked before
NUM_TOKENS = 24
BUDGET, SMALL_BUDGET = 64, 10
SMALL_POOL = 20  # blocks: the request and its bully begin, and cannot both end
CHOICE = dict.fromkeys(PATTERN[:4], 100.0)  # few tokens, so that they follow each other again


@dataclass
class Run:
    """An engine, and what is seen of its requests: by how much each step moved `computed`."""

    engine: Engine
    events: list[Event] = field(default_factory=list)
    moves: dict[str, list[int]] = field(default_factory=dict)
    output: dict[str, list[int]] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.client.core.subscribe(self.events.append)

    def add(self, prompt: list[int], num_tokens: int, **changed: Any) -> str:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logit_bias=CHOICE
        )
        request = self.engine.requests.make(RenderedPrompt(prompt), params)
        self.engine.client.add(msgspec.structs.replace(request, **changed))
        self.moves[request.request_id] = []
        return request.request_id

    def computed(self, name: str) -> int:
        sequence = self.engine.client.core.scheduler.lifecycle.sequences.get(name)
        return 0 if sequence is None else sequence.num_computed_tokens

    def step(self) -> None:
        before = {name: self.computed(name) for name in self.moves}
        for output in self.engine.client.step():
            if output.finished:
                self.output[output.request_id] = list(output.outputs[0].token_ids)
                self.told[output.request_id] = output.kv_transfer_params
        for name, num in before.items():
            self.moves[name].append(self.computed(name) - num)

    def finish(self, *names: str) -> None:
        while not self.output.keys() >= set(names):
            self.step()

    def of(self, kind: type, name: str) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and e.request_id == name]  # type: ignore[attr-defined]


def engine(rows: tuple[str, ...], store: str) -> Engine:
    pool = SMALL_POOL if PREEMPTION in rows else 64
    more: dict[str, Any] = {"speculative_config": {"method": "none"}}
    if GUESSING in rows:
        more["speculative_config"] = {"method": "ngram", "prompt_lookup_max": 1}
    if HANDED_OVER in rows:
        more |= {"kv_store": (store,), "kv_host_gb": 0.001}
    return build_engine(
        config_from_flat(
            model=str(text_checkpoint()),
            dtype="float32",
            block_size=BLOCK,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=SMALL_BUDGET if CHUNKED in rows else BUDGET,
            kv_cache_memory_bytes=pool_bytes(text_checkpoint(), pool, BLOCK, 4),
            enable_prefix_caching=CACHING in rows or HANDED_OVER in rows,
            preemption_mode="recompute",
            pipeline_depth=1,
            disable_log_stats=True,
            **more,
        )
    )


def handed_over(store: str) -> tuple[int, Any]:
    """Let another engine compute the prompt; the token that it sampled, and its answer's params."""
    other = Run(engine((HANDED_OVER,), store))
    core = other.engine.client.core
    name = other.add(PROMPT, 1, kv_transfer=KVTransfer(keeps=True))
    other.finish(name)
    core.settle()
    while stores_of(core).num_open:
        core.wait_for_answers()
    stores = core.view().stores
    assert stores is not None and stores.num_kept == len(PROMPT) // BLOCK, "before it ends"
    other.engine.client.close()
    return other.output[name][0], other.told[name]


def run(rows: tuple[str, ...], store: str) -> tuple[list[list[int]], dict[str, str], Run]:
    """Run requests that are all of these; their tokens, which of them each row is about, and what
    was seen."""
    found, hands_over = Run(engine(rows, store)), HANDED_OVER in rows
    if CACHING in rows:
        found.finish(found.add(PROMPT[:NUM_SHARED], 1))
    first, transfer = list[int](), None
    if hands_over:
        token, told = handed_over(store)
        first, transfer = [token], transfer_of(told)
    neighbour = found.add(NEIGHBOUR, 4)
    name = stream = ""
    if hands_over or STREAMING not in rows:
        name = found.add(PROMPT + first, NUM_TOKENS - len(first), priority=1, kv_transfer=transfer)
    if STREAMING in rows:
        while name and not found.of(Admitted, name):
            found.step()
        stream = found.add(PROMPT[:NUM_PIECE], NUM_TOKENS, is_open=True, priority=not hands_over)
        while found.computed(stream) < NUM_PIECE - 1:
            found.step()
        found.engine.client.append(stream, PROMPT[NUM_PIECE:], is_last=True)
    if PREEMPTION in rows:
        while found.computed(name or stream) < len(PROMPT) + 2:
            found.step()
        found.add(BULLY, 16)
    asked = [each for each in (name, stream) if each]
    found.finish(neighbour, *asked)
    found.engine.client.core.scheduler.check_invariants()
    found.engine.client.close()
    about = dict.fromkeys(ROWS, name or stream)
    about |= {PREFILL: neighbour, DECODE: neighbour, STREAMING: stream}
    return [(first if each == name else []) + found.output[each] for each in asked], about, found


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """What a plain engine answers."""
    plain = Run(engine((), ""))
    name = plain.add(PROMPT, NUM_TOKENS)
    plain.finish(name)
    plain.engine.client.close()
    return plain.output[name]


@pytest.fixture
def store() -> Iterator[str]:
    with shared_store() as url:
        yield url


@pytest.fixture(autouse=True)
def guesses_whatever_steps_take(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    yield


def check(row: str, rows: tuple[str, ...], name: str, seen: Run) -> None:
    """Assert that a request was what a row of the table says."""
    moves = [num for num in seen.moves[name] if num]
    steps = [event for event in seen.events if isinstance(event, Stepped)]
    cached = seen.of(Admitted, name)[0].num_cached_tokens
    if row == PREFILL:
        assert moves[0] == len(NEIGHBOUR)
    elif row == DECODE:
        assert moves[1:3] == [1, 1]
    elif row == PREEMPTION:
        assert seen.of(Preempted, name) and min(moves[:-1]) < 0, "computed went back"
    elif row == CHUNKED:
        assert 0 < moves[0] - cached < SMALL_BUDGET < len(PROMPT), "a part of the prompt"
    elif row == STREAMING:
        assert sum(event.num_tokens for event in seen.of(Appended, name)) >= 12
    elif row == CACHING:
        assert cached >= NUM_SHARED // BLOCK * BLOCK
    elif row == HANDED_OVER:
        stores = seen.engine.client.core.view().stores
        assert cached == len(PROMPT), "all that was computed elsewhere: one token waits"
        assert stores is not None and stores.num_fetched > 0
        if CACHING in rows and STREAMING not in rows:
            local = NUM_SHARED // BLOCK
            assert stores.num_fetched == len(PROMPT) // BLOCK - local, "local hits are not moved"
    else:
        assert sum(s.num_draft_tokens for s in steps) > sum(s.num_accepted for s in steps) > 0
        assert max(moves[-NUM_TOKENS:]) > 1


@pytest.mark.parametrize(
    "rows",
    [*slow_but((row,) for row in ROWS), *combinations(ROWS, 2), ROWS],
    ids=lambda rows: "all" if rows == ROWS else " and ".join(rows),
)
def test_rows_together(rows: tuple[str, ...], alone: list[int], store: str) -> None:
    found, about, seen = run(rows, store)
    assert all(tokens == alone for tokens in found)
    for row in rows:
        check(row, rows, about[row], seen)

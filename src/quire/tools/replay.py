"""Replay a recording without the model: the same calls must give the same plans.

The scheduler starts from a segment's snapshot. It gets the recorded calls with their results,
including the answers of stores, so no store is used. Every plan and every order to a store is
compared field by field. For a recording without tokens, digests also come from the recording.
"""

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from quire.base.errors import EngineError, RecordingDamaged
from quire.base.events import Event, PrefixFound
from quire.base.kv_orders import Order
from quire.base.plan import Plan
from quire.base.plugins import file_class
from quire.base.settings.config import SchedulerConfig, row_capacity
from quire.base.settings.kv_transfer import EVICTED
from quire.engine.recording.calls import (
    ADD,
    CALLS,
    CONTROL,
    PLAN_FIELDS,
    SCHEDULE,
    UPDATE,
    Call,
    Fields,
    calls_of,
    order_fields,
    plan_fields,
)
from quire.engine.recording.files import Segment
from quire.engine.recording.frames import State
from quire.engine.recording.redact import Redaction
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import Digester, Named
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.decisions import Decisions
from quire.scheduler.policy.policies import (
    EVICTION_POLICIES,
    POLICIES,
    make_block_hash,
    make_eviction,
    make_policy,
)
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.snapshot import STATE_VERSION, decode, restore, with_current_names

MAX_CHARS = 160  # maximum length of a printed value
IN_WORDS = {
    State.CUT: "is cut off: its writer was killed or is still running, or its end was lost",
    State.DAMAGED: "is damaged: its content has changed",
}


@dataclass(frozen=True)
class Difference:
    """The first difference between recording and replay."""

    step_id: int  # step of the plan
    subject: str
    recorded: str
    replayed: str
    during: str  # call that made the plan
    before: str  # call before it

    def lines(self) -> list[str]:
        return [
            f"step {self.step_id}: {self.subject} differs",
            f"  recorded: {self.recorded}",
            f"  replayed: {self.replayed}",
            f"  in the call: {self.during}",
            f"  the call before it: {self.before}",
        ]


@dataclass
class Step:
    """One repeated call."""

    call: Call
    plan: Plan | None  # plan that the call made, if any
    events: list[Event]  # the scheduler's events
    difference: Difference | None = None
    sampling: Seq[Sequence] = ()  # sequences of the plan's sample_rows, in order


@dataclass
class Outcome:
    """The outcome of a replay. `state` is the worst segment's; `notes` are for the user."""

    num_steps: int = 0
    num_calls: int = 0
    num_requests: int = 0
    num_segments: int = 0
    duration_s: float = 0.0
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)
    state: State = State.WHOLE

    def see(self, segment: Segment) -> None:
        """Count a segment, and note if it is incomplete."""
        self.num_segments += 1
        if segment.state is not State.WHOLE:
            self.note(segment, segment.state, segment.problem)

    def note(self, segment: Segment, state: State, problem: str) -> None:
        self.state = max(self.state, state)
        self.notes.append(f"{segment.path.name} {IN_WORDS[state]} ({problem})")

    def note_difference(self) -> None:
        """Note the difference, for commands that show the recording and not differences."""
        if self.difference is not None:
            self.notes.append(
                f"this version of quire plans differently from step {self.difference.step_id} on;"
                " later steps are not compared. Use the version that made the recording."
            )

    def summary(self) -> str:
        rate = self.num_steps / max(self.duration_s, 1e-9)
        which = "all plans" if self.state is State.WHOLE else "all plans that can be read are"
        return (
            f"{self.num_steps:,} steps, {self.num_requests:,} requests: {which} identical"
            f" ({rate:,.0f} steps/s)"
        )


class RecordedDigests(Digester):
    """The digester of a replay without tokens: returns the digests recorded for the call."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[tuple[int, list[bytes]]] = deque()
        self._num_made = 0
        self.problem: tuple[str, str] | None = None  # recorded, replayed

    def begin(self, call: Call) -> None:
        self._waiting = deque(call.digests)
        self.problem = None

    def end(self) -> None:
        if self._waiting and self.problem is None:
            self.problem = _blocks(*self._next()), "no digests requested"

    def __call__(self, named: Seq[Named], block_size: int, counts: Seq[int]) -> None:
        """Add the recorded digests; see `Digester`."""
        for sequence, count in zip(named, counts, strict=True):
            if count > len(sequence.digests):
                self._extend(sequence, count - len(sequence.digests))

    def _extend(self, sequence: Named, num: int) -> None:
        arrival, digests = self._next()
        if (arrival, len(digests)) == (sequence.arrival, num):
            self._waiting.popleft()
            sequence.digests += digests
            return
        if self.problem is None:
            requested = [b""] * num
            self.problem = _blocks(arrival, digests), _blocks(sequence.arrival, requested)
        for _ in range(num):  # continue with unique digests, to see the effect
            self._num_made += 1
            sequence.digests.append(hashlib.sha256(b"made up %d" % self._num_made).digest())

    def _next(self) -> tuple[int, list[bytes]]:
        return self._waiting[0] if self._waiting else (-1, [])


Show = Callable[[Segment, Step, Scheduler], None]


def replay_all(
    segments: Iterable[Segment],
    show: Show | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Replay segments until the first difference. Of an incomplete one, replay the valid part.

    show: called after each repeated call."""
    outcome = outcome or Outcome()
    for segment in segments:
        outcome.see(segment)
        if not segment.is_readable:
            continue
        began_s = time.perf_counter()
        run = _Replay(segment)
        if not segment.follows or outcome.num_segments == 1:
            outcome.num_requests += len(run.scheduler.lifecycle.sequences)
        try:
            _replay_one(run, outcome, show)
        except RecordingDamaged as error:
            outcome.note(segment, State.DAMAGED, str(error))
        outcome.duration_s += time.perf_counter() - began_s
        if outcome.difference is not None:
            return outcome
    return outcome


def _replay_one(run: "_Replay", outcome: Outcome, show: Show | None) -> None:
    for step in run.steps():
        outcome.num_calls += 1
        outcome.num_steps += step.plan is not None
        outcome.num_requests += step.call.kind == ADD and not step.call.is_refused
        if show is not None:
            show(run.segment, step, run.scheduler)
        if step.difference is not None:
            outcome.difference = step.difference


class _Replay:
    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.is_old = segment.header.get("state") != STATE_VERSION
        self.has_tokens = bool(segment.header["has_tokens"])
        self.redaction = None if self.has_tokens else Redaction(b"")
        self.digests = RecordedDigests()
        self.scheduler = restored(segment, None if self.has_tokens else self.digests)
        self.before: Call | None = None

    def steps(self) -> Iterator[Step]:
        items = self.segment.items
        for call in calls_of(with_current_names(items) if self.is_old else items):
            self.digests.begin(call)
            decisions, raised = Decisions(), None
            try:
                decisions = carry_out(self.scheduler, call)
            except Exception as error:
                raised = type(error).__name__
            self.digests.end()
            plan = decisions.plan
            difference = self._compare(call, plan, raised)
            difference = difference or self._compare_orders(call, decisions.orders)
            visible = [event for event in decisions.events if not isinstance(event, PrefixFound)]
            sampling = () if decisions.sampling is None else tuple(decisions.sampling)
            yield Step(call, plan, [*visible, *call.found], difference, sampling)
            if difference is not None or raised is not None:
                return
            self.before = call

    def _compare(self, call: Call, plan: Plan | None, raised: str | None) -> Difference | None:
        if raised != call.raised:
            texts = [
                f"{name} was raised" if name else "nothing was raised"
                for name in (call.raised, raised)
            ]
            return self._difference(call, "the outcome", *texts)
        if raised is not None:
            return None
        found = None if plan is None else plain(plan_fields(plan, self.redaction))
        if found == call.plan:
            if not self.has_tokens and self.digests.problem is not None:
                return self._difference(call, "the look-up", *self.digests.problem)
            return None
        if found is None or call.plan is None:
            texts = ["no plan" if each is None else "a plan" for each in (call.plan, found)]
            return self._difference(call, "whether there is a plan", *texts)
        name = next(n for n in PLAN_FIELDS if found.get(n) != call.plan.get(n))
        shown = _show(name, call.plan.get(name), found.get(name))
        return self._difference(call, f"plan.{name}", *shown)

    def _compare_orders(self, call: Call, orders: list[Order]) -> Difference | None:
        """Return the first difference of orders to stores; None for a call that raised."""
        found = [plain(order_fields(order, self.redaction)) for order in orders]
        if call.raised is not None or found == call.orders:
            return None
        nothing: Fields = {}
        for recorded, replayed in zip_longest(call.orders, found, fillvalue=nothing):
            for name in sorted(recorded.keys() | replayed.keys()):
                values = recorded.get(name), replayed.get(name)
                if values[0] != values[1]:
                    subject = (recorded or replayed)["order"]
                    texts = _show(name, *values) if recorded and replayed else _either(recorded)
                    name = f".{name}" if recorded and replayed else ""
                    return self._difference(call, f"an order to a store, {subject}{name},", *texts)
        return None

    def _difference(self, call: Call, subject: str, recorded: str, replayed: str) -> Difference:
        step_id = self.scheduler.planner.next_step_id
        if call.plan is not None:
            step_id = call.plan["step_id"]
        return Difference(
            step_id, subject, recorded, replayed, in_words(call), in_words(self.before)
        )


def restored(
    segment: Segment, digester: Digester | None = None, policy: str | None = None
) -> Scheduler:
    """Return the scheduler as it was at the start of a segment.

    digester: computes block names; by default with the recorded engine's hash. policy: replaces the
    recorded policy of an engine's start. Raises EngineError, and ConfigError if the hash's package
    is not installed."""
    if digester is None:
        name = segment.header["settings"].get("prefix_caching_hash_algo", "sha256")
        if file_class(name) is not None:
            raise EngineError(f"the recording names a file of code, {name!r}; it is not loaded.")
        digester = Digester(make_block_hash(name))
    if segment.header["new"] is not None:
        return _new_scheduler(segment.header, digester, policy)
    version = segment.header.get("state", 1)
    if version != STATE_VERSION:
        raise EngineError(
            f"{segment.path} begins with a state of version {version}, and this version of quire"
            f" reads {STATE_VERSION}. Use the version that made the recording."
        )
    scheduler = restore(segment.snapshot)
    if not isinstance(scheduler, Scheduler):
        raise EngineError(f"{segment.path} holds no scheduler.")
    scheduler.continue_with(digester)
    return scheduler


def _new_scheduler(
    header: dict[str, Any], digester: Digester, policy_name: str | None
) -> Scheduler:
    """Create the scheduler of a new engine, as this version does.

    Recordings from an engine's start can be replayed even if the format of states has changed."""
    settings, parts = header["settings"], decode(header["new"])
    _check_ours(settings)
    kv = KVManager(
        parts["groups"],
        parts["num_blocks"],
        settings["block_size"],
        settings["enable_prefix_caching"],
        block_bytes=parts["block_bytes"],
        host_limits=parts.get("host_limits"),
        make_eviction=make_eviction(settings.get("eviction_policy", "lru")),
    )
    names = [item.name for item in dataclasses.fields(SchedulerConfig)]
    config = SchedulerConfig(**{name: settings[name] for name in names if name in settings})
    max_tokens = config.max_num_batched_tokens or 0
    fingerprint = parts.get("fingerprint", b"")
    memory = Memory(kv, max_tokens, settings["watermark"], fingerprint, digester)
    policy = make_policy(policy_name or config.scheduling_policy)
    num_stores, kept = parts.get("num_stores", 0), parts.get("kept", EVICTED)
    num_stages = settings.get("pipeline_parallel_size", 1)
    length = row_capacity(settings["max_model_len"], settings.get("runner", "auto"))
    takes_media = parts.get("takes_media", False)
    scheduler = Scheduler(memory, config, length, policy, num_stores, num_stages, kept, takes_media)
    scheduler.control(parts["rates"], header["now_s"])
    return scheduler


def _check_ours(settings: dict[str, Any]) -> None:
    """Raise EngineError for classes of packages or files. No engine records them, and a recording
    must not choose which code runs here."""
    for name, ours in (("scheduling_policy", POLICIES), ("eviction_policy", EVICTION_POLICIES)):
        if (value := settings.get(name, next(iter(ours)))) not in ours:
            raise EngineError(
                f"the recording names {name}={value!r}, which is not one of quire's:"
                f" {', '.join(ours)}. It cannot be replayed."
            )
    if settings.get("scheduler_extensions"):
        raise EngineError("the recording names scheduler_extensions, which cannot be replayed.")


def carry_out(scheduler: Scheduler, call: Call) -> Decisions:
    """Pass a call through its door. Raises RequestError for a request that is refused now and was
    accepted in the recording."""
    if call.kind == SCHEDULE:
        return scheduler.schedule(call.now)
    if call.kind == UPDATE:
        return scheduler.update(call.value, call.now)
    if call.kind == CONTROL:
        return scheduler.control(call.value, call.now)
    decisions = scheduler.add(call.value, call.now)
    if decisions.refusal is not None and not call.is_refused:
        raise decisions.refusal
    return decisions


def plain(fields: Fields) -> Any:
    """Return fields as a file would hold them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fields))


def in_words(call: Call | None) -> str:
    """Return a description of a call in one line."""
    if call is None:
        return "none in this segment"
    about = ""
    if call.kind == ADD:
        about = f" request {call.value.request_id}, {len(call.value.prompt_token_ids)} tokens"
    elif call.kind == CONTROL:
        about = f" {_cut(repr(call.value))}"
    elif call.kind == UPDATE:
        about = f" step {call.value.step_id}"
    elif call.plan is not None:
        about = f" step {call.plan['step_id']}"
    return f"{CALLS[call.kind]}{about} at {call.now:.6f} s"


def _show(name: str, recorded: Any, replayed: Any) -> tuple[str, str]:
    if isinstance(recorded, bytes) or isinstance(replayed, bytes):
        both = [np.frombuffer(value or b"", np.int32) for value in (recorded, replayed)]
        size = min(map(len, both))
        at = int(np.argmax(np.append(both[0][:size] != both[1][:size], True)))
        first, second = (_array(value, at) for value in both)
        return first, second
    if isinstance(recorded, dict) and isinstance(replayed, dict):
        part = next(key for key in recorded if recorded[key] != replayed[key])
        shown = _show(part, recorded[part], replayed[part])
        return f"{part}: {shown[0]}", f"{part}: {shown[1]}"
    return _cut(repr(recorded)), _cut(repr(replayed))


def _array(values: Any, at: int) -> str:
    """Return the array's length, and a few entries around index `at`."""
    first = max(0, at - 2)
    shown = ", ".join(str(v) for v in values[first : at + 6].tolist())
    return f"{len(values)} entries; from entry {first}: [{shown}]"


def _either(recorded: Fields) -> tuple[str, str]:
    return ("the order", "none") if recorded else ("none", "the order")


def _blocks(arrival: int, digests: list[bytes]) -> str:
    if arrival < 0:
        return "no digests"
    return f"digests of {len(digests)} blocks of the sequence with arrival {arrival}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."

"""Timelines of requests, built from the core's events, as JSON data and as sentences.

`Timelines` subscribes to the core's event stream, live or from a replay. During steady decoding it
only checks whether a prompt is being computed. It keeps the last MAX_ENDED_REQUESTS ended
requests, and at most MAX_ITEMS chunks and preemptions of each request.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from quire.base.events import (
    Admitted,
    Event,
    Finished,
    GrammarTaken,
    Planned,
    Preempted,
    PrefixFound,
    Queued,
    Stepped,
)
from quire.base.prefix import PrefixReport
from quire.engine.observability import prefix_words
from quire.scheduler.views import RequestView, SchedulerView

MAX_ENDED_REQUESTS = 1000  # ended requests
MAX_ITEMS = 32  # preemptions and chunks of one request with individual records
MAX_RECENT_CHUNKS = (
    1024  # recent chunks of all requests, searched for the prompts a request waited for
)
LONG_TOKENS = 1000  # minimum length of a long prompt


@dataclass(slots=True)
class Chunks:
    """Chunks computed before the next sampled token. each: (time, tokens) of the first chunks."""

    num: int = 0
    num_tokens: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    each: list[tuple[float, int]] = field(default_factory=list)

    def take(self, at_s: float, num_tokens: int) -> None:
        if not self.num:
            self.first_s = at_s
        self.num += 1
        self.num_tokens += num_tokens
        self.last_s = at_s
        if len(self.each) < MAX_ITEMS:
            self.each.append((at_s, num_tokens))


@dataclass(slots=True)
class PreemptedSpan:
    """Preemption of a request, until it gets a row again. by: request that needed the memory."""

    at_s: float
    by: str
    num_lost_tokens: int
    is_swapped: bool
    resumed_s: float = math.nan
    chunks: Chunks = field(default_factory=Chunks)  # recomputed tokens


@dataclass(slots=True, eq=False)
class Timeline:
    """Timeline of one request. Times are in seconds on the core's clock; NaN: not yet or unknown.

    began_before: whether it began before the recording; then admitted_s may be infinity. grammar_s:
    when its grammar was compiled. others: (request id, prompt tokens, tokens computed) of prompts
    that were computed while the request waited for its first row.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    received_s: float
    queued_s: float
    tenant: str = ""
    began_before: bool = False
    has_grammar: bool = False
    grammar_s: float = math.nan
    admitted_s: float = math.nan
    num_cached_tokens: int = 0
    prefix: PrefixReport | None = None
    num_sequences: int = 1
    others: list[tuple[str, int, int]] = field(default_factory=list)
    num_others: int = 0
    num_others_long: int = 0
    num_others_tokens: int = 0
    chunks: Chunks = field(default_factory=Chunks)
    first_token_s: float = math.nan
    num_preemptions: int = 0
    preemptions: list[PreemptedSpan] = field(default_factory=list)
    finished_s: float = math.nan
    reason: str = ""
    num_output_tokens: int = 0

    @property
    def state(self) -> str:
        if self.reason:
            return "finished"
        if math.isnan(self.admitted_s):
            return "waiting"
        is_preempted = bool(self.preemptions) and math.isnan(self.preemptions[-1].resumed_s)
        return "preempted" if is_preempted else "running"


class Timelines:
    """Timelines of requests, built from events. block_size: unit of prefix hits, in tokens."""

    def __init__(self, num_rows: int, block_size: int, max_ended: int = MAX_ENDED_REQUESTS) -> None:
        self.block_size = block_size
        self.open: dict[str, Timeline] = {}
        self.ended: OrderedDict[str, Timeline] = OrderedDict()
        self._max_ended = max_ended
        self._filling: dict[int, Timeline] = {}  # row -> request whose prompt is computed there
        self._due: dict[int, list[Timeline]] = {}  # step -> requests with their first token in it
        self._work: deque[tuple[float, str, int, int]] = deque(maxlen=MAX_RECENT_CHUNKS)
        self._tokens = np.zeros(num_rows, np.int32)  # scratch: tokens of a plan by row

    @classmethod
    def of(
        cls,
        view: SchedulerView,
        requests: Iterable[RequestView],
        max_ended: int = MAX_ENDED_REQUESTS,
    ) -> "Timelines":
        """Create timelines of a scheduler's present requests, as far as its state shows them."""
        lines = cls(view.num_rows, view.block_size, max_ended)
        for found in requests:
            request = found.request
            line = Timeline(
                request.request_id, found.num_prompt_tokens, request.params.max_tokens,
                request.received_s or found.arrival_s, found.arrival_s, request.tenant,
                began_before=True, has_grammar=bool(request.grammar),
            )  # fmt: skip
            if found.num_cached_tokens >= 0:
                line.admitted_s, line.num_cached_tokens = math.inf, found.num_cached_tokens
            lines._filling.update(dict.fromkeys(found.filling, line))
            lines.open[request.request_id] = line
        return lines

    def find(self, request_id: str) -> list[Timeline]:
        """Return timelines by request id, or by response id: cmpl-X matches cmpl-X-0, cmpl-X-1."""
        for lines in (self.open, self.ended):
            if request_id in lines:
                return [lines[request_id]]
        parts = [*self.ended.values(), *self.open.values()]
        prefix = request_id + "-"
        return [line for line in parts if request_id and line.request_id.startswith(prefix)]

    def text(self, request_id: str, tenant: str | None = None) -> str:
        """Return a request's timeline as JSON for a client, without ids of other requests. Return
        an empty text for an unknown request, or for a request of another tenant than `tenant`."""
        mine = [line for line in self.find(request_id) if tenant in (None, line.tenant)]
        found = [as_data(line, self.block_size, hides_others=True) for line in mine]
        if not found:
            return ""
        data = found[0] if len(found) == 1 else {"object": "list", "data": found}
        return msgspec.json.encode(data).decode()

    def __call__(self, event: Event) -> None:
        match event:
            case Planned():
                if self._filling:
                    self._plan(event)
            case Stepped():
                for line in self._due.pop(event.step_id, ()):
                    if math.isnan(line.first_token_s):
                        line.first_token_s = event.at_s
            case Queued():
                received_s = event.received_s or event.at_s
                self.open[event.request_id] = Timeline(
                    event.request_id, event.num_prompt_tokens, event.max_tokens, received_s,
                    event.at_s, event.tenant, has_grammar=event.has_grammar,
                )  # fmt: skip
            case GrammarTaken():
                if event.request_id in self.open:
                    self.open[event.request_id].grammar_s = event.at_s
            case Admitted():
                self._admit(event)
            case PrefixFound():
                if event.request_id in self.open:
                    self.open[event.request_id].prefix = event.report
            case Preempted():
                self._preempt(event)
            case Finished():
                self._finish(event)

    def _plan(self, event: Planned) -> None:
        """Record a plan's chunks of the prompts that are being computed."""
        plan = event.plan
        if plan is None:
            return
        rows = list(self._filling)
        self._tokens[plan.rows] = plan.num_tokens - plan.num_drafts
        taken = self._tokens[rows].tolist()
        self._tokens[plan.rows] = 0
        samples = None
        for row, num_tokens in zip(rows, taken, strict=True):
            if num_tokens == 0:
                continue
            line = self._filling[row]
            self._chunks_of(line).take(event.at_s, num_tokens)
            work = event.at_s, line.request_id, line.num_prompt_tokens, num_tokens
            self._work.append(work)
            samples = set(plan.sample_sources.tolist()) if samples is None else samples
            if row in samples:
                del self._filling[row]
                self._due.setdefault(event.step_id, []).append(line)

    def _chunks_of(self, line: Timeline) -> Chunks:
        return line.preemptions[-1].chunks if line.preemptions else line.chunks

    def _admit(self, event: Admitted) -> None:
        line = self.open.get(event.request_id)
        self._filling.pop(event.row, None)
        if line is None:
            return
        line.num_sequences = max(line.num_sequences, event.index + 1)
        stay = line.preemptions[-1] if line.preemptions else None
        if math.isnan(line.admitted_s):
            line.admitted_s, line.num_cached_tokens = event.at_s, event.num_cached_tokens
            self._record_others(line)
        elif stay is not None and math.isnan(stay.resumed_s):
            stay.resumed_s = event.at_s
        elif event.index > 0 and stay is None:
            return  # forked from a row that computed the prompt
        self._filling[event.row] = line

    def _record_others(self, line: Timeline) -> None:
        """Record the other prompts that were computed between a request's arrival and admission."""
        found: dict[str, tuple[int, int]] = {}
        for at_s, request_id, num_prompt, num_tokens in reversed(self._work):
            if at_s < line.queued_s:
                break
            if request_id != line.request_id:
                known = found.get(request_id, (0, 0))[1]
                found[request_id] = num_prompt, known + num_tokens
        max_ended = sorted(found.items(), key=lambda item: -item[1][1])
        line.num_others = len(found)
        line.num_others_long = sum(num >= LONG_TOKENS for num, _ in found.values())
        line.num_others_tokens = sum(num for _, num in found.values())
        line.others = [(name, *numbers) for name, numbers in max_ended[:MAX_ITEMS]]

    def _preempt(self, event: Preempted) -> None:
        line = self.open.get(event.request_id)
        if line is None:
            return
        self._leave_rows(line)
        line.num_preemptions += 1
        stay = PreemptedSpan(event.at_s, event.for_request_id, event.num_lost_tokens, event.swapped)
        if len(line.preemptions) >= MAX_ITEMS:
            line.preemptions.pop()
        line.preemptions.append(stay)

    def _finish(self, event: Finished) -> None:
        line = self.open.pop(event.request_id, None)
        if line is None:
            return
        self._leave_rows(line)
        line.finished_s, line.reason = event.at_s, event.reason
        line.num_output_tokens = event.num_output_tokens
        line.num_sequences = event.num_sequences
        if event.is_sent_whole:
            line.first_token_s = event.at_s if event.num_output_tokens else math.nan
        self.ended[line.request_id] = line
        self.ended.move_to_end(line.request_id)
        if len(self.ended) > self._max_ended:
            self.ended.popitem(last=False)

    def _leave_rows(self, line: Timeline) -> None:
        for row in [row for row, other in self._filling.items() if other is line]:
            del self._filling[row]


# ---- descriptions ----------------------------------------------------------------------------


def as_data(line: Timeline, block_size: int, hides_others: bool = False) -> dict[str, Any]:
    """Return a timeline as JSON data. Times are in milliseconds since the request was received;
    null means not yet or unknown.

    hides_others: omit the ids of other requests, which a client must not see.
    """

    def name(request_id: str) -> str | None:
        return None if hides_others else request_id

    def at(time_s: float) -> float | None:
        return _ms(time_s - line.received_s)

    def chunks(found: Chunks) -> dict[str, Any]:
        each = [{"at_ms": at(at_s), "tokens": num} for at_s, num in found.each]
        return {"num": found.num, "tokens": found.num_tokens, "first": each}

    preemptions = [
        {
            "at_ms": at(stay.at_s),
            "by": name(stay.by),
            "way": "swapped" if stay.is_swapped else "recomputed",
            "lost_tokens": stay.num_lost_tokens,
            "back_ms": at(stay.resumed_s),
            "chunks": chunks(stay.chunks),
        }
        for stay in line.preemptions
    ]
    prefix = {} if line.prefix is None else prefix_words.as_data(line.prefix, hides_others)
    grammar = {"grammar_ms": at(line.grammar_s)} if line.has_grammar else {}
    others = [{"id": name(i), "prompt_tokens": n, "tokens": m} for i, n, m in line.others]
    return {
        "id": line.request_id,
        "object": "request.timeline",
        "state": line.state,
        "prompt_tokens": line.num_prompt_tokens,
        "max_tokens": line.max_tokens,
        "num_sequences": line.num_sequences,
        "queued_ms": at(line.queued_s),
        **grammar,
        "admitted_ms": at(line.admitted_s),
        "waited_ms": _ms(line.admitted_s - line.queued_s),
        "behind": {
            "num": line.num_others,
            "num_long": line.num_others_long,
            "tokens": line.num_others_tokens,
            "prompts": others,
        },
        "cached_tokens": line.num_cached_tokens,
        **prefix,
        "chunks": chunks(line.chunks),
        "first_token_ms": at(line.first_token_s),
        "num_preemptions": line.num_preemptions,
        "preemptions": preemptions,
        "finished_ms": at(line.finished_s),
        "finish_reason": line.reason or None,
        "output_tokens": line.num_output_tokens if line.reason else None,
        "in_words": in_words(line, block_size, hides_others),
    }


def in_words(line: Timeline, block_size: int, hides_others: bool = False) -> list[str]:
    """Describe a request's timeline, one sentence per event. hides_others: as in `as_data`."""
    sentences = [f"{_count(line.num_prompt_tokens, 'prompt token')}, {_limit(line)}"]
    if line.began_before:
        sentences.append("began before the recording; its earlier events are not known")
    sentences += _waiting(line)
    if line.state == "waiting":
        return sentences
    if line.admitted_s < math.inf:
        sentences.append(_prefix(line, block_size, hides_others))
    if line.chunks.num:
        sentences.append(_computed(line.chunks, "the prompt was computed"))
    if not math.isnan(line.first_token_s):
        sentences.append(f"first token after {_time(line.first_token_s - line.received_s)}")
    sentences += _preemptions(line, hides_others)
    if line.reason:
        took = _time(line.finished_s - line.received_s)
        of = f" in {line.num_sequences} sequences" if line.num_sequences > 1 else ""
        tokens = _count(line.num_output_tokens, "output token")
        sentences.append(f"ended after {took} ({line.reason}) with {tokens}{of}")
    else:
        sentences.append(f"is {line.state}")
    return sentences


def _limit(line: Timeline) -> str:
    return "no limit of its own" if line.max_tokens is None else f"at most {line.max_tokens:,} out"


def _waiting(line: Timeline) -> list[str]:
    lacked_grammar = line.has_grammar and math.isnan(line.grammar_s)
    if math.isnan(line.admitted_s):
        waits_for = " for its grammar" if lacked_grammar else ""
        return [f"is still waiting{waits_for}"] if not line.reason else ["never left the queue"]
    if line.admitted_s == math.inf:
        return []
    waited = f"waited {_time(line.admitted_s - line.queued_s)}"
    if line.num_others:
        long = "long " if line.num_others_long == line.num_others else ""
        waited += f" behind {_count(line.num_others, f'{long}prompt')}"
        waited += (
            f" ({_count(line.num_others_tokens, 'token')} of them were computed in the meantime)"
        )
    if line.has_grammar and not lacked_grammar:
        waited += f", the first {_time(line.grammar_s - line.queued_s)} for its grammar"
    return [waited]


def _prefix(line: Timeline, block_size: int, hides_others: bool) -> str:
    if line.prefix is not None:
        return prefix_words.in_words(line.prefix, line.num_prompt_tokens, hides_others)
    cached, num = line.num_cached_tokens, line.num_prompt_tokens
    if not cached:
        return "no prefix hit"
    share = f"prefix hit {100 * cached / num:.0f} %"
    if num - cached <= block_size:
        return f"{share}: all whole blocks of the prompt"
    return f"{share}, diverged at token {cached:,}"


def _computed(chunks: Chunks, phrase: str) -> str:
    span = f" within {_time(chunks.last_s - chunks.first_s)}" if chunks.num > 1 else ""
    of = _count(chunks.num_tokens, "token")
    return f"{phrase} in {_count(chunks.num, 'chunk')} ({of}{span})"


def _preemptions(line: Timeline, hides_others: bool) -> list[str]:
    sentences = []
    for number, stay in enumerate(line.preemptions):
        by = "another request" if hides_others else stay.by
        way = "swapped" if stay.is_swapped else f"{_count(stay.num_lost_tokens, 'token')} dropped"
        back = "not back yet"
        if not math.isnan(stay.resumed_s):
            back = f"back after {_time(stay.resumed_s - stay.at_s)}"
        elif line.reason:
            back = "never back"
        at = _time(stay.at_s - line.received_s)
        sentences.append(f"preempted at {at}, by {by}, {way}; {back}")
        if not stay.is_swapped and stay.chunks.num:
            sentences[-1] += "; " + _computed(stay.chunks, "computed again")
        if number == 0 and line.num_preemptions > 1:
            sentences[-1] += f" (the first of {line.num_preemptions})"
    return sentences


def _ms(seconds: float) -> float | None:
    return round(seconds * 1e3, 3) if math.isfinite(seconds) else None


def _time(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds:,.1f} s"


def _count(num: int, phrase: str) -> str:
    return f"{num:,} {phrase}{'' if num == 1 else 's'}"

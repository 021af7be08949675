"""Calls to the scheduler's four doors and their effects, as plain data.

    [ADD, now, request]  [CONTROL, now, message]  [SCHEDULE, now]  [UPDATE, now, result]    calls
    [DIGESTS, [arrival, digest ...] ...]  [FOUND, event ...]  [PLAN, fields]       effects of a call
    [REFUSED]  [RAISED, message]
    [ORDERS, fields ...]                                                 orders to stores
    [END, why]                                                   last item of a complete segment

A plan is written as its differences from a prediction, which is made from the plan before it. In
steady decoding little more than the step number remains.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.base.errors import RecordingDamaged
from quire.base.events import PrefixFound
from quire.base.kv_orders import LookUp, Order, Remove
from quire.base.plan import BlockWrites, Candidates, Plan, StepResult
from quire.engine.recording.redact import NEUTRAL, Redaction
from quire.scheduler.core.sequence import Sequence as Line
from quire.scheduler.snapshot import decode, encode

(
    ADD, CONTROL, SCHEDULE, UPDATE, DIGESTS, PLAN, REFUSED, RAISED, END, FOUND, ORDERS,
) = range(11)  # fmt: skip
CALLS = {ADD: "add", CONTROL: "control", SCHEDULE: "schedule", UPDATE: "update"}
CONTINUES = "goes on"  # reason of an end, if the next segment continues this one
STICKY = (
    "rows", "num_tokens", "computed_bound", "sample_rows", "num_candidates", "masked_rows",
)  # fmt: skip
PLAN_FIELDS = Plan.__struct_fields__

Fields = dict[str, Any]


@dataclass
class Call:
    """Recorded call to a door, with its effects. value: a request, a message or a result.

    plan: fields of the plan; None if the call returned no plan. digests: (arrival number of a
    sequence, its new digests). found: reports of prefix hits, which a replay cannot compute.
    orders: fields of each order to a store.
    """

    kind: int
    now: float
    value: Any = None
    plan: Fields | None = None
    digests: list[tuple[int, list[bytes]]] = field(default_factory=list)
    found: list[PrefixFound] = field(default_factory=list)
    is_refused: bool = False
    raised: str | None = None
    orders: list[Fields] = field(default_factory=list)


class CallEncoder:
    """Encoder of one segment's items as plain data. redaction: None records everything."""

    def __init__(self, redaction: Redaction | None) -> None:
        self._redaction = redaction
        self._prediction = PlanPrediction()

    def encode(self, item: tuple[Any, ...]) -> list[Any]:
        kind = item[0]
        if kind == PLAN:
            return [PLAN, self._prediction.shorten(plan_fields(item[1], self._redaction))]
        if kind == UPDATE:
            return [UPDATE, item[1], self._result(*item[2:])]
        if kind == DIGESTS:
            return [
                DIGESTS,
                *([arrival, *map(self._data, all_[a:b])] for arrival, all_, a, b in item[1]),
            ]
        if kind == FOUND:
            return [FOUND, *map(encode, item[1])]
        if kind == ORDERS:
            return [ORDERS, *(order_fields(order, self._redaction) for order in item[1])]
        if kind in (ADD, CONTROL):
            value = item[2]
            if self._redaction is not None:
                if kind == ADD:
                    self._redaction.take_stops(value)
                value = self._redaction.value(value)
            return [kind, item[1], encode(value)]
        return list(item)

    def _data(self, digest: bytes) -> bytes:
        return digest if self._redaction is None else self._redaction.data(digest)

    def _result(self, result: StepResult, flown: Sequence[Line], rows: Any) -> Fields:
        fields: Fields = {"step": result.step_id, "s": result.duration_s}
        token_ids, accepted = result.token_ids, result.num_accepted
        fields["shape"] = token_ids.shape
        if not (accepted == 1).all():
            fields["accepted"] = accepted.astype(np.int32).tobytes()
        redaction, errors, candidates = self._redaction, result.row_errors, result.candidates
        error = result.error
        prompts: dict[int, Any] = result.prompt_candidates
        if redaction is None:
            fields["ids"] = token_ids.astype(np.int32).tobytes()
        else:
            fields["stops"] = _stops(redaction, token_ids, accepted, flown)
            candidates = _of_beams(redaction, candidates, flown, rows)
            errors = {row: redaction.error(message) for row, message in errors.items()}
            error = redaction.error(error) if error else error
            nothing = Candidates(np.empty(0, np.int32), np.empty(0, np.float32), 0)
            prompts = {row: [nothing] * len(found) for row, found in prompts.items()}
        more = {
            "candidates": candidates,
            "prompt_candidates": prompts,
            "more_candidates": result.more_candidates if redaction is None else {},
            "row_errors": errors,
            "unservable_rows": result.unservable_rows,
            "lost_swaps": result.lost_swaps,
            "error": error,
        }
        fields |= {name: encode(value) for name, value in more.items() if value}
        return fields


def _stops(
    redaction: Redaction, token_ids: Any, accepted: Any, flown: Sequence[Line]
) -> dict[int, int]:
    """Return the sampled tokens that are stop tokens of their sequence, by their index in the
    flattened token_ids [num_rows, width]."""
    num, width = token_ids.shape
    if width == 0 or num == 0:
        return {}
    flat = token_ids.ravel()
    is_there = np.arange(width) < accepted[:, None]
    indices = np.flatnonzero(redaction.may_stop(flat) & is_there.ravel()).tolist()
    stop_ids = (flown[index // width].request.stop_token_ids for index in indices)
    pairs = zip(indices, stop_ids, strict=True)
    return {index: int(flat[index]) for index, ids in pairs if flat[index] in ids}


def _of_beams(
    redaction: Redaction, candidates: dict[int, Candidates], flown: Sequence[Line], rows: Any
) -> dict[int, Candidates]:
    """Return redacted candidates of beam searches; only clients read other candidates."""
    if not candidates:
        return {}
    owners = dict(zip(rows.tolist(), flown, strict=True))
    return {
        row: redaction.candidates(found, owners[row].request.stop_token_ids)
        for row, found in candidates.items()
        if row in owners and owners[row].request.params.use_beam_search
    }


def plan_fields(plan: Plan, redaction: Redaction | None) -> Fields:
    """Return the non-empty fields of a plan. Two plans are the same if their fields are equal."""
    fields: Fields = {}
    for name in PLAN_FIELDS:
        value = getattr(plan, name)
        if isinstance(value, np.ndarray):
            if len(value) and name != "last_ids":  # tokens that results record
                fields[name] = value.astype(np.int32, copy=False).tobytes()
        elif isinstance(value, BlockWrites):
            if len(value.group):
                fields[name] = {
                    part: getattr(value, part).tobytes()
                    for part in ("group", "row", "index", "block_id")
                }
        elif value or name == "step_id":
            fields[name] = encode(value if redaction is None else redaction.value(value, name))
    return fields


def order_fields(order: Order, redaction: Redaction | None) -> Fields:
    """Return the fields of an order. Its block names are reduced to one digest, since the recording
    has them elsewhere. Two orders are the same if their fields are equal."""
    fields: Fields = {"order": type(order).__name__, "store": order.store, "ticket": order.ticket}
    if isinstance(order, LookUp | Remove):
        names = order.names
    else:
        names = tuple(item[:2] for item in order.items)
        blocks = np.array([block for _, _, block in order.items], np.int32)
        fields["host_blocks"] = blocks.tobytes()
    state = hashlib.blake2b(digest_size=8)
    for group, digest in names:
        known = digest if redaction is None else redaction.data(digest)
        state.update(group.to_bytes(4, "little") + known)
    if isinstance(order, LookUp) and order.wait_s:
        fields["wait_s"] = order.wait_s
    return fields | {"num_blocks": len(names), "names": state.hexdigest()}


class PlanPrediction:
    """Prediction of the next plan: all rows continue as in the last plan."""

    def __init__(self) -> None:
        self._last: Fields = {}

    def shorten(self, fields: Fields) -> Fields:
        """Return the fields that differ from the prediction. `without` lists the predicted fields
        that the plan lacks."""
        prediction, self._last = self._next(), fields
        short = {
            n: value for n, value in fields.items() if n not in prediction or prediction[n] != value
        }
        missing = [name for name in prediction if name not in fields]
        return short | ({"without": missing} if missing else {})

    def complete(self, short: Fields) -> Fields:
        """Return all fields of a plan from the result of `shorten`."""
        fields = self._next() | short
        for name in fields.pop("without", ()):
            del fields[name]
        self._last = {name: fields[name] for name in PLAN_FIELDS if name in fields}
        return self._last

    def _next(self) -> Fields:
        last = self._last
        if not last:
            return {}
        prediction = {name: last[name] for name in STICKY if name in last}
        if "computed_bound" in last:  # absent in a plan without rows, which only moves blocks
            bound = np.frombuffer(last["computed_bound"], np.int32)
            num_tokens = np.frombuffer(last["num_tokens"], np.int32)
            prediction["computed_bound"] = (bound + num_tokens).tobytes()
        prediction["step_id"] = last["step_id"] + 1
        return prediction


def calls_of(items: Sequence[Any]) -> Iterator[Call]:
    """Yield the calls of a segment, each with its effects. Raises RecordingDamaged.

    The last call of a segment without an end is omitted unless it raised, because its effects may
    be missing.
    """
    call: Call | None = None
    is_whole = False
    prediction = PlanPrediction()
    try:
        for item in items:
            kind = item[0]
            if kind == END:
                is_whole = True
                break
            if kind in CALLS:
                if call is not None:
                    yield call
                call = _call(kind, *item[1:])
            else:
                assert call is not None, "a call's result comes before the call"
                _add(call, kind, item[1:], prediction)
    except RecordingDamaged:
        raise
    except Exception as error:
        raise RecordingDamaged(
            f"a recording is damaged: {type(error).__name__}: {error}"
        ) from error
    if call is not None and (is_whole or call.raised is not None):
        yield call


def end_of(items: Sequence[Any]) -> str | None:
    """Return the reason of a segment's end; None if the segment was cut off."""
    return str(items[-1][1]) if items and items[-1][0] == END else None


def _call(kind: int, now: float, value: Any = None) -> Call:
    if kind in (ADD, CONTROL):
        return Call(kind, now, decode(value))
    return Call(kind, now, _result(value) if kind == UPDATE else None)


def _add(call: Call, kind: int, rest: list[Any], prediction: PlanPrediction) -> None:
    if kind == DIGESTS:
        call.digests += [(arrival, new) for arrival, *new in rest]
    elif kind == FOUND:
        call.found += map(decode, rest)
    elif kind == PLAN:
        call.plan = prediction.complete(rest[0])
    elif kind == ORDERS:
        call.orders = rest
    elif kind == REFUSED:
        call.is_refused = True
    elif kind == RAISED:
        call.raised = rest[0]
    else:
        raise RecordingDamaged(f"a recording holds an item of the unknown kind {kind!r}.")


def _result(fields: Fields) -> StepResult:
    shape = tuple(fields["shape"])
    if "ids" in fields:
        token_ids = np.frombuffer(fields["ids"], np.int32).reshape(shape)
    else:
        token_ids = np.full(shape, NEUTRAL, np.int32)
        for index, token_id in fields["stops"].items():
            token_ids.flat[index] = token_id
    accepted = np.ones(shape[0], np.int32)
    if "accepted" in fields:
        accepted = np.frombuffer(fields["accepted"], np.int32)
    names = (
        "candidates", "prompt_candidates", "more_candidates", "row_errors", "unservable_rows",
        "lost_swaps", "error",
    )  # fmt: skip
    more = {name: decode(fields[name]) for name in names if name in fields}
    return StepResult(fields["step"], token_ids, accepted, duration_s=fields["s"], **more)

"""What a step gave, on its way to the clients.

In steady decode each sequence has a token and nothing else to tell. These go as parallel arrays, in
which a sequence is its row; only who has more to say, such as an end or log-probabilities, gets a
message of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.base.messages import (
    BeamOutput,
    NewTokens,
    Request,
    RowName,
    SequenceOutput,
    StepMessage,
)
from quire.base.plan import Int32
from quire.scheduler.beams import Hypothesis
from quire.scheduler.results import StepOutputs
from quire.scheduler.sequence import Int64, Sequence


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """Sequences with one token each and no other news, as parallel arrays.

    rows: the row of each. arrivals: their arrival numbers, which are never used twice.
    """

    sequences: npt.NDArray[np.object_]
    token_ids: Int32
    rows: Int32
    arrivals: Int64

    def __len__(self) -> int:
        return len(self.token_ids)

    def some(self, which: npt.NDArray[np.generic]) -> "PlainTokens":
        """Those at some places: their numbers, or one bool for each."""
        return PlainTokens(
            self.sequences[which], self.token_ids[which], self.rows[which], self.arrivals[which]
        )

    def outputs(self) -> list[SequenceOutput]:
        """The same, one by one."""
        return [
            SequenceOutput(
                s.request.request_id, [token], num_cached_tokens=s.num_cached_tokens, index=s.index
            )
            for s, token in zip(self.sequences.tolist(), self.token_ids.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class News:
    """plain: those with one token each and no other news. outputs: the others."""

    plain: PlainTokens | None = None
    outputs: list[SequenceOutput] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.plain or self.outputs)

    def messages(self) -> list[SequenceOutput]:
        """One per sequence that has news."""
        return self.outputs if self.plain is None else self.plain.outputs() + self.outputs


class StepWriter:
    """Makes the message that each client of a core gets of a step.

    owner_of: the client of a request id; None if nobody wants its tokens any more.
    """

    def __init__(self, num_rows: int, owner_of: Callable[[str], int | None]) -> None:
        self._owner_of = owner_of
        # By row: whose name the owner was told last, as arrival, and who the owner is (-1: nobody).
        self._named = np.full(num_rows, -1, np.int64)
        self._owner = np.full(num_rows, -1, np.int64)

    def write(self, news: News) -> dict[int, StepMessage]:
        """By client; those without news are left out."""
        others: dict[int, list[SequenceOutput]] = {}
        for output in news.outputs:
            owner = self._owner_of(output.request_id)
            if owner is not None:
                others.setdefault(owner, []).append(output)
        tokens = self._tokens(news.plain) if news.plain else {}
        return {
            client: StepMessage(others.get(client, []), tokens.get(client))
            for client in others.keys() | tokens.keys()
        }

    def _tokens(self, plain: PlainTokens) -> dict[int, NewTokens]:
        fresh = plain.some(self._named[plain.rows] != plain.arrivals)
        names = self._name(fresh) if len(fresh) else {}
        owners = self._owner[plain.rows]
        first = int(owners[0])
        if (owners == first).all():
            clients = {first: plain}
        else:
            clients = {int(each): plain.some(owners == each) for each in np.unique(owners)}
        return {
            client: NewTokens(mine.rows, mine.token_ids, names.get(client, []))
            for client, mine in clients.items()
            if client >= 0
        }

    def _name(self, fresh: PlainTokens) -> dict[int, list[RowName]]:
        """Note who is in these rows from now on, and what their clients are to be told of them."""
        names: dict[int, list[RowName]] = {}
        for row, sequence in zip(fresh.rows.tolist(), fresh.sequences.tolist(), strict=True):
            name = sequence.request.request_id
            owner = self._owner_of(name)
            self._named[row], self._owner[row] = sequence.arrival, -1 if owner is None else owner
            if owner is not None:
                told = RowName(row, name, sequence.index, max(0, sequence.num_cached_tokens))
                names.setdefault(owner, []).append(told)
        return names


class StepReader:
    """Reads the messages that a core sends over one connection, all of them in their order."""

    def __init__(self) -> None:
        self._names: dict[int, RowName] = {}

    def read(self, message: StepMessage) -> list[SequenceOutput]:
        """One per sequence that has news."""
        tokens = message.tokens
        if tokens is None:
            return message.outputs
        names = self._names
        for name in tokens.names:
            names[name.row] = name
        plain = []
        for row, token in zip(tokens.rows.tolist(), tokens.token_ids.tolist(), strict=True):
            name = names[row]
            plain.append(
                SequenceOutput(
                    name.request_id,
                    [token],
                    num_cached_tokens=name.num_cached_tokens,
                    index=name.index,
                )
            )
        return plain + message.outputs


def news_of(outputs: StepOutputs) -> News:
    """One message per sequence that has more to say than a token."""
    plain = PlainTokens(outputs.sequences, outputs.token_ids, outputs.rows, outputs.arrivals)
    if outputs.plain:
        return News(plain, [_report(sequence) for sequence in outputs.reports])
    talkers = {s.arrival: s for s in outputs.others}
    is_talking = np.isin(plain.arrivals, [*outputs.endings, *outputs.candidates, *talkers])
    is_talking |= plain.rows < 0
    talking = plain.some(is_talking)
    talkers |= {sequence.arrival: sequence for sequence in talking.sequences}
    tokens = dict(zip(talking.arrivals.tolist(), talking.token_ids.tolist(), strict=True))
    messages = [
        _message(sequence, tokens.get(arrival), outputs) for arrival, sequence in talkers.items()
    ]
    messages += [_beams(sequence, found) for sequence, found in outputs.hypotheses]
    messages += [_report(s) for s in outputs.reports if s.arrival not in talkers]
    return News(plain.some(~is_talking), messages)


def _report(sequence: Sequence) -> SequenceOutput:
    """Of a request that was admitted with this step, and has nothing else to tell than a token."""
    return SequenceOutput(
        sequence.request.request_id,
        [],
        num_cached_tokens=max(0, sequence.num_cached_tokens),
        prefix=sequence.report,
    )


def _message(sequence: Sequence, token: int | None, outputs: StepOutputs) -> SequenceOutput:
    arrival = sequence.arrival
    ending = outputs.endings.get(arrival)
    candidates = outputs.candidates.get(arrival)
    return SequenceOutput(
        request_id=sequence.request.request_id,
        token_ids=[] if token is None else [token],
        finish_reason=ending.reason if ending else None,
        stop_reason=ending.stop_reason if ending else None,
        candidates=None if candidates is None else [candidates],
        prompt_candidates=outputs.prompt_candidates.get(arrival),
        num_cached_tokens=max(0, sequence.num_cached_tokens),
        num_preemptions=sequence.num_preemptions,
        error=ending.error if ending else None,
        error_code=ending.code if ending else None,
        index=sequence.index,
        prefix=sequence.report if sequence in outputs.reports else None,
    )


def _beams(sequence: Sequence, hypotheses: list[Hypothesis]) -> SequenceOutput:
    """All results of a beam search, with which its request ends."""
    request = sequence.request
    beams = [_beam(request, hypothesis) for hypothesis in hypotheses]
    return SequenceOutput(
        request.request_id,
        [],
        beams[0].finish_reason,
        num_cached_tokens=max(0, sequence.num_cached_tokens),
        num_preemptions=sequence.num_preemptions,
        beams=beams,
        prefix=sequence.report,
    )


def _beam(request: Request, hypothesis: Hypothesis) -> BeamOutput:
    last = hypothesis.token_ids[-1]
    is_named = hypothesis.is_stop and last not in request.eos_token_ids
    return BeamOutput(
        list(hypothesis.token_ids),
        hypothesis.score,
        hypothesis.cumulative_logprob,
        hypothesis.finish_reason,
        last if is_named else None,
    )

"""What a step gave, on its way to the clients.

In steady decode each sequence has a token and nothing else to tell. These go as parallel lists;
only who has more to say, such as an end or log-probabilities, gets a message of its own.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from quire.base.messages import BeamOutput, NewTokens, Request, SequenceOutput
from quire.scheduler.beams import Hypothesis
from quire.scheduler.results import StepOutputs
from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class News:
    """sequences, token_ids: those with one token each and no other news. outputs: the others."""

    sequences: list[Sequence] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.outputs)

    @property
    def request_ids(self) -> list[str]:
        """Of `sequences`."""
        return [sequence.request.request_id for sequence in self.sequences]

    def tokens(self, request_ids: list[str], places: Seq[int] | None = None) -> NewTokens:
        """The sequences at some places (None: all) for the wire. request_ids: of all of them."""
        sequences, token_ids = self.sequences, self.token_ids
        if places is not None:
            sequences = [sequences[i] for i in places]
            token_ids = [token_ids[i] for i in places]
            request_ids = [request_ids[i] for i in places]
        return NewTokens(
            request_ids,
            token_ids,
            [sequence.num_cached_tokens for sequence in sequences],
            [sequence.index for sequence in sequences],
        )

    def messages(self) -> list[SequenceOutput]:
        """One per sequence that has news."""
        plain = [
            SequenceOutput(
                s.request.request_id, [token], num_cached_tokens=s.num_cached_tokens, index=s.index
            )
            for s, token in zip(self.sequences, self.token_ids, strict=True)
        ]
        return plain + self.outputs


def news_of(outputs: StepOutputs) -> News:
    """One message per sequence that has more to say than a token."""
    sequences, token_ids = outputs.sequences.tolist(), outputs.token_ids.tolist()
    if outputs.plain:
        return News(sequences, token_ids, [_report(sequence) for sequence in outputs.reports])
    talkers = {s.arrival: s for s in outputs.others}
    for sequence in sequences:
        arrival = sequence.arrival
        if arrival in outputs.endings or arrival in outputs.candidates:
            talkers[arrival] = sequence
    tokens: dict[int, int] = {}  # of the talkers
    news = News([], [])
    for sequence, token in zip(sequences, token_ids, strict=True):
        if sequence.arrival in talkers:
            tokens[sequence.arrival] = token
        else:
            news.sequences.append(sequence)
            news.token_ids.append(token)
    news.outputs += [
        _message(sequence, tokens.get(arrival), outputs) for arrival, sequence in talkers.items()
    ]
    news.outputs += [_beams(sequence, found) for sequence, found in outputs.hypotheses]
    news.outputs += [_report(s) for s in outputs.reports if s.arrival not in talkers]
    return news


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
        "stop" if hypothesis.is_stop else "length",
        last if is_named else None,
    )

"""Beam search: which candidates live on, which are finished, and when it is over (P 4.4).

Pure selection, on scores and tokens; rows and blocks are the scheduler's. The rules, orders and
stopping conditions are those of transformers' `generate(num_beams=...)`:

- All beams' candidates are looked at by accumulated log-probability, best first. Those that end (a
  stop token, or the last possible length) are finished if they are among the first `width`; their
  score is the accumulated log-probability over length ** length_penalty. The first `width` of the
  others live on. There are always as many: `RequestLimits` refuses a search that is wider than the
  tokens that do not stop, so after its first step it has `width` beams until it is over.
- A candidate of log-probability -inf is none: a grammar does not allow it. Beams that cannot be
  filled go on as copies of the best one with the score -inf, which never comes before another.
- `early_stopping` True: over as soon as `width` sequences are finished. False: over when the best
  living beam, at its present length, would be worse than all finished ones. "never": the same with
  the length that would favour it most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.base.plan import Candidates

NEVER_CHOSEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Beam:
    """A candidate that lives on: the beam that it comes from, its token, its accumulated score."""

    parent: int
    token_id: int
    score: np.float32


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence: its output tokens, the last one that of its ending.

    score: what hypotheses are ordered by; cumulative_logprob: before the length penalty.
    """

    token_ids: tuple[int, ...]
    score: float
    cumulative_logprob: float
    is_stop: bool

    @property
    def finish_reason(self) -> str:
        return "stop" if self.is_stop else "length"


@dataclass(slots=True)
class BeamSearch:
    """The state of one search. scores: of the living beams, in order; best first."""

    width: int
    max_output: int
    stop_token_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    scores: list[np.float32] = field(default_factory=lambda: [np.float32(0)])
    finished: list[Hypothesis] = field(default_factory=list)
    is_over: bool = False

    @property
    def num_kept(self) -> int:
        """Candidates per beam that a step needs: its own best `width` that go on, and all that may
        stop before them."""
        return self.width + len(self.stop_token_ids)

    def advance(
        self, candidates: Sequence[Candidates], outputs: Sequence[Sequence[int]]
    ) -> list[Beam]:
        """Take one step. candidates: of each living beam, its best num_kept tokens in order (after
        the chosen one); outputs: the tokens that each has so far. Returns the beams that live
        on."""
        length = len(outputs[0]) + 1
        is_last = length >= self.max_output
        ended: list[Beam] = []
        alive: list[Beam] = []
        for place, beam in enumerate(self._ranked(candidates)):
            if beam.score == NEVER_CHOSEN:
                break
            if place >= self.width and (is_last or len(alive) == self.width):
                break
            if is_last or beam.token_id in self.stop_token_ids:
                ended += [beam] if place < self.width else []
            elif len(alive) < self.width:
                alive.append(beam)
        alive += [replace(beam, score=NEVER_CHOSEN) for beam in alive[:1]] * (
            self.width - len(alive)
        )
        self._finish(ended, outputs, length)
        self.scores = [beam.score for beam in alive]
        self._look_for_the_end(length)
        return [] if self.is_over else alive

    def hypotheses(self, num: int) -> list[Hypothesis]:
        """Return the best `num` finished sequences, best first."""
        return self.finished[:num]

    def _ranked(self, candidates: Sequence[Candidates]) -> Iterator[Beam]:
        """Yield all candidates, best first; of equal ones, those of the better beam first."""
        own = slice(1, self.num_kept + 1)
        totals = [c.logprobs[own] + s for c, s in zip(candidates, self.scores, strict=True)]
        scores = np.concatenate(totals)
        token_ids = np.concatenate([c.token_ids[own] for c in candidates])
        parents = np.repeat(np.arange(len(totals)), [len(total) for total in totals])
        for i in np.argsort(-scores, kind="stable").tolist():
            yield Beam(int(parents[i]), int(token_ids[i]), np.float32(scores[i]))

    def _finish(self, ended: list[Beam], outputs: Sequence[Sequence[int]], length: int) -> None:
        """Keep the best `width` of all that have ended."""
        for beam in ended:
            tokens = (*outputs[beam.parent], beam.token_id)
            is_stop = beam.token_id in self.stop_token_ids
            score = self._score(beam.score, length)
            self.finished.append(Hypothesis(tokens, score, float(beam.score), is_stop))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: earlier ones first
        del self.finished[self.width :]

    def _score(self, cumulative_logprob: np.float32, length: int) -> float:
        divisor: float = length**self.length_penalty
        return float(cumulative_logprob) / divisor

    def _look_for_the_end(self, length: int) -> None:
        if not self.scores:
            self.is_over = True
        elif len(self.finished) == self.width:  # with fewer, each beam may be among the best
            favoured = self.early_stopping == "never" and self.length_penalty > 0
            possible = self._score(self.scores[0], self.max_output if favoured else length)
            self.is_over = self.early_stopping is True or possible <= self.finished[-1].score

"""Beam search: chooses the surviving candidates, the finished ones, and the end (P 4.4).

It selects by scores and tokens only; the scheduler handles rows and blocks. Rules, orders and
stopping conditions are equal to transformers' `generate(num_beams=...)`:

- The candidates of all beams are ranked by accumulated log-probability. A candidate that ends (a
  stop token, or the maximum length) is finished if it is among the first `width`. Its score is the
  accumulated log-probability over length ** length_penalty. The first `width` of the others
  survive. There are always as many: `RequestLimits` refuses a search wider than the number of
  tokens that do not stop. So after its first step, a search has `width` beams until it is over.
- A candidate with log-probability -inf is ignored: a grammar forbids it. Missing beams become
  copies of the best one with score -inf, which ranks after all others.
- `early_stopping` True: over as soon as `width` sequences are finished. False: over when the best
  living beam, at its present length, would score worse than all finished ones. "never": the same,
  at the length that would favour it most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.base.plan import Candidates

NEVER_CHOSEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Beam:
    """Surviving candidate: its parent's index, its token, its accumulated score."""

    parent: int
    token_id: int
    score: np.float32


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Finished sequence: its output tokens, including the last one.

    score: rank among hypotheses; cumulative_logprob: sum before the length penalty.
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
    """State of one search. scores: of the living beams, best first."""

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
        """Number of candidates per beam that a step needs: `width` survivors, and all stop tokens
        that may rank before them."""
        return self.width + len(self.stop_token_ids)

    def advance(
        self, candidates: Sequence[Candidates], outputs: Sequence[Sequence[int]]
    ) -> list[Beam]:
        """Advance the search by one step. Return the surviving beams; none if it is over.
        candidates: num_kept best tokens of each living beam, in order, after the chosen token.
        outputs: its tokens so far."""
        length = len(outputs[0]) + 1
        is_last = length >= self.max_output
        ended: list[Beam] = []
        alive: list[Beam] = []
        for index, beam in enumerate(self._ranked(candidates)):
            if beam.score == NEVER_CHOSEN:
                break
            if index >= self.width and (is_last or len(alive) == self.width):
                break
            if is_last or beam.token_id in self.stop_token_ids:
                ended += [beam] if index < self.width else []
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
        """Yield all candidates, best first. Among equal scores, candidates of the better beam come
        first."""
        own = slice(1, self.num_kept + 1)
        totals = [c.logprobs[own] + s for c, s in zip(candidates, self.scores, strict=True)]
        scores = np.concatenate(totals)
        token_ids = np.concatenate([c.token_ids[own] for c in candidates])
        parents = np.repeat(np.arange(len(totals)), [len(total) for total in totals])
        for i in np.argsort(-scores, kind="stable").tolist():
            yield Beam(int(parents[i]), int(token_ids[i]), np.float32(scores[i]))

    def _finish(self, ended: list[Beam], outputs: Sequence[Sequence[int]], length: int) -> None:
        """Add ended beams to the finished sequences, and keep the best `width` of these."""
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
        elif len(self.finished) == self.width:  # with fewer, each beam may still be among the best
            favoured = self.early_stopping == "never" and self.length_penalty > 0
            possible = self._score(self.scores[0], self.max_output if favoured else length)
            self.is_over = self.early_stopping is True or possible <= self.finished[-1].score

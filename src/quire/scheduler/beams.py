"""Beam search: which candidates live on, which are finished, and when it is over (P 4.4).

Pure selection, on scores and tokens; rows and blocks are the scheduler's. The rules, orders and
stopping conditions are those of transformers' `generate(num_beams=...)`:

- Of all beams' candidates the best `num_kept` by accumulated log-probability are looked at. Those
  that end (a stop token, or the last possible length) are finished if they are among the first
  `width`; their score is the accumulated log-probability over length ** length_penalty. The first
  `width` of the others live on.
- `early_stopping` True: over as soon as `width` sequences are finished. False: over when the best
  living beam, at its present length, would be worse than all finished ones. "never": the same with
  the length that would favour it most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.base.plan import Candidates

NONE = np.float32(-1e9)


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
    can_improve: bool = True
    is_over: bool = False

    @property
    def num_kept(self) -> int:
        """Candidates per beam that a step needs: enough to go on if all best ones end."""
        return max(2, 1 + len(self.stop_token_ids)) * self.width

    def advance(
        self, candidates: Sequence[Candidates], outputs: Sequence[Sequence[int]]
    ) -> list[Beam]:
        """One step. candidates: of each living beam, its best num_kept tokens in order (after the
        chosen one); outputs: the tokens that each has so far. Returns the beams that live on."""
        length = len(outputs[0]) + 1
        best = self._best(candidates)
        ends = [b.token_id in self.stop_token_ids or length >= self.max_output for b in best]
        alive = [beam for beam, end in zip(best, ends, strict=True) if not end][: self.width]
        self._finish(best[: self.width], ends, outputs, length)
        self.scores = [beam.score for beam in alive]
        self._look_for_the_end(length, all(ends))
        return [] if self.is_over else alive

    def hypotheses(self, num: int) -> list[Hypothesis]:
        """The best `num` finished sequences, best first."""
        return self.finished[:num]

    def _best(self, candidates: Sequence[Candidates]) -> list[Beam]:
        scores = np.concatenate(
            [
                c.logprobs[1 : self.num_kept + 1] + score
                for c, score in zip(candidates, self.scores, strict=True)
            ]
        )
        token_ids = np.concatenate([c.token_ids[1 : self.num_kept + 1] for c in candidates])
        parents = np.repeat(
            np.arange(len(candidates)),
            [len(c.token_ids[1 : self.num_kept + 1]) for c in candidates],
        )
        order = np.argsort(-scores, kind="stable")[: self.num_kept]
        return [
            Beam(int(parents[i]), int(token_ids[i]), np.float32(scores[i])) for i in order.tolist()
        ]

    def _finish(
        self, best: list[Beam], ends: list[bool], outputs: Sequence[Sequence[int]], length: int
    ) -> None:
        """Keep the best `width` of all that have ended."""
        is_full = len(self.finished) == self.width and self.early_stopping is True
        if is_full or not self.can_improve:
            return
        for beam, end in zip(best, ends, strict=False):
            if end:
                tokens = (*outputs[beam.parent], beam.token_id)
                score = beam.score / np.float32(length**self.length_penalty)
                is_stop = beam.token_id in self.stop_token_ids
                new = Hypothesis(tokens, float(score), float(beam.score), is_stop)
                self.finished.append(new)
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: earlier ones first
        del self.finished[self.width :]

    def _look_for_the_end(self, length: int, all_end: bool) -> None:
        if self.scores:
            favoured = self.early_stopping == "never" and self.length_penalty > 0
            hypothetical = self.max_output if favoured else length
            possible = self.scores[0] / np.float32(hypothetical**self.length_penalty)
            is_full = len(self.finished) == self.width
            worst = np.float32(self.finished[-1].score) if is_full else NONE
            self.can_improve = self.can_improve and bool(possible > worst)
        is_full = len(self.finished) == self.width
        self.is_over = not self.can_improve or (is_full and self.early_stopping is True) or all_end

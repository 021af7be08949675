"""Records of a drafter's proposals, place by place, and their replay for another model's answers.

A record comes from requests that the demo model answers one at a time. It holds what the drafter
proposes before the engine chooses how many draft tokens pay off. Meanwhile the drafter never rests.
Inside an accepted draft, the rest of that draft counts as proposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.models.drafts.engines import MeasuredEngine
from benchmarks.models.drafts.workloads import DraftRequest
from quire.engine.attachments.drafting import DraftingAttachment
from quire.engine.attachments.on_demand import OnDemand
from quire.engine.drafting.drafting import Drafting, Proposal

ProposedTokens = tuple[int, int]  # number of proposed tokens, and how many of them are right


@dataclass(frozen=True)
class Record:
    """Proposals for one answer, by the number of its tokens before them."""

    places: list[ProposedTokens]

    @classmethod
    def of(cls, answer: list[int], proposed: dict[int, list[int]]) -> "Record":
        """Compare proposals with the answer. proposed: draft tokens by the answer's tokens before
        them."""
        places: list[ProposedTokens] = [(0, 0)] * len(answer)
        for begin in sorted(proposed):
            draft_ids = proposed[begin][: len(answer) - begin]
            num, num_right = len(draft_ids), _num_common(draft_ids, answer[begin:])
            for i in range(num_right + 1):
                if i < num:
                    places[begin + i] = num - i, num_right - i
        return cls(places)


@dataclass(frozen=True)
class Replayed:
    """An answer whose drafts follow a record. num_prompt: tokens before the answer. The record
    repeats if the answer is longer."""

    num_prompt: int
    answer: list[int]
    record: Record
    vocab_size: int

    def drafts(self, num_known: int, max_drafts: int) -> list[int]:
        """Return the draft tokens of a sequence with this many tokens."""
        at = num_known - self.num_prompt
        num, num_right = self.record.places[at % len(self.record.places)]
        found = self.answer[at : at + min(num, max_drafts)]
        return [
            token if i < num_right else (token + 1) % self.vocab_size
            for i, token in enumerate(found)
        ]


REPLAYED: dict[int, Replayed] = {}  # of the requests that run now, by the first token of the prompt


def record_of(engine: MeasuredEngine, requests: Sequence[DraftRequest]) -> list[Record]:
    """Answer requests one at a time, and return a record of each."""
    drafter, found = drafter_of(engine), list[Record]()
    proposals, proposed = drafter.proposals, dict[int, list[int]]()

    def noted(sequences: list[Any], num_pending: int = 0) -> list[Proposal]:
        made: list[Proposal] = proposals(sequences, num_pending)
        for each in made:
            proposed.setdefault(each.sequence.num_output_tokens, each.draft_ids)
        return made

    # Without step times all drafts are taken, and without rests each step has a look-up.
    replaced: dict[str, Any] = {"proposals": noted}
    replaced |= dict.fromkeys(("observe", "_decide_rests", "_rest"), _do_nothing)
    drafter.__dict__.update(replaced)
    for request in requests:
        proposed.clear()
        [answer] = engine.run([request]).answers
        found.append(Record.of(answer, proposed))
    for name in replaced:
        delattr(drafter, name)  # the methods of its class remain
    return found


def drafter_of(engine: MeasuredEngine) -> Any:
    """Return the drafter of an engine on the host."""
    attached = engine.engine.client.core.attachments.all
    others = [each for found in attached if isinstance(found, OnDemand) for each in found.others]
    for each in (*attached, *others):
        if isinstance(each, DraftingAttachment) and isinstance(each.drafter, Drafting):
            return each.drafter
    raise ValueError("this engine has no drafter on the host; set another method")


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))

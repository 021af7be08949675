"""What a step gave: one type, from the scheduler over the wire to the client.

In steady decode each sequence has a token and nothing else to tell. These are two columns, in which
a sequence is its row. Who has more to tell, such as an end or log-probabilities, has an entry of
its own instead. A token's way:

    StepResult       the device's answer                             runner/steps.py
      StepOutputs    made by the fourth door                         scheduler/core/step_results.py
        StepOutputs  each client's part, over its socket             engine/wire/core_server.py
          text       detokenised, ended by stop strings              engine/client/output.py
            event    taken from a mailbox, written to the socket     serve/api/http/sse.py
"""

from typing import Self

import msgspec
import numpy as np

from quire.base.errors import GRAMMAR_FAILED, GRAMMAR_FAULT, REQUEST_FAILED
from quire.base.plan import Candidates, Float64, Int32
from quire.base.prefix import PrefixReport
from quire.base.settings.kv_transfer import HandedOver


class Failure(msgspec.Struct, frozen=True, gc=False):
    """What went wrong with a request. code: for programs (base/errors.py)."""

    code: str
    message: str

    @classmethod
    def of_request(cls, message: str) -> Self:
        """Return the failure of a request that asks for what cannot be done."""
        is_grammar = message.startswith(GRAMMAR_FAULT)
        return cls(GRAMMAR_FAILED if is_grammar else REQUEST_FAILED, message)


class Finish(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a sequence ended.

    reason: stop, length, abort, error, timeout, pinned or repetition. stop_reason: the stop token
    that ended it, or the stop string, which only the client sees; None for end of sequence. error:
    of `error` and `timeout`.
    """

    reason: str
    stop_reason: int | str | None = None
    error: Failure | None = None


# Of all sequences of a request that somebody else than its client has ended.
CANCELLED = Finish("abort", "cancelled")


class BeamOutput(msgspec.Struct, frozen=True, gc=False):
    """One result of a beam search; they come best first. score: what they are ordered by."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish: Finish


class SequenceUpdate(msgspec.Struct, gc=False, omit_defaults=True):
    """What one step gave one sequence of a request. index: which of the request's n it is.

    candidates: one for each of token_ids. beams: all results of a beam search, with which the
    request has ended. prefix: what of the prompt was cached, once. num_guessed: guesses that it
    tried in the step; those that were right are the tokens behind the first. pooled: what the
    prompt came to, of a model that pools. handed_over: with the end, what of the prompt goes to
    stores for another engine.

    None can be part of a cycle, so the garbage collector need not look at them.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    finish: Finish | None = None
    candidates: list[Candidates] | None = None
    prompt_candidates: list[Candidates] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    beams: list[BeamOutput] | None = None
    prefix: PrefixReport | None = None
    num_guessed: int = 0
    pooled: Float64 | None = None
    handed_over: HandedOver | None = None


class RowName(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Which sequence of a request is in a row, from this step on."""

    row: int
    request_id: str
    index: int
    num_cached_tokens: int


def _no_ints() -> Int32:
    return np.empty(0, np.int32)


class StepOutputs(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """What one step gave; to a client, what it gave this client's requests.

    rows, token_ids: one token each for sequences that have nothing else to tell. names: of the rows
    that somebody took with this step; of others a token is 8 bytes. details: of the sequences that
    have more to tell than a token.
    """

    rows: Int32 = msgspec.field(default_factory=_no_ints)
    token_ids: Int32 = msgspec.field(default_factory=_no_ints)
    names: list[RowName] = []
    details: list[SequenceUpdate] = []

    def __bool__(self) -> bool:
        return bool(len(self.rows) or self.names or self.details)

    @property
    def finished(self) -> list[tuple[SequenceUpdate, Finish]]:
        """The sequences that ended with it, and how."""
        return [(told, told.finish) for told in self.details if told.finish is not None]


class StepReader:
    """Knows who is in which row, from all outputs of one core in their order."""

    def __init__(self) -> None:
        self._names: dict[int, RowName] = {}

    def tokens(self, outputs: StepOutputs) -> list[tuple[RowName, int]]:
        """Return the tokens of those that have nothing else to tell, each with whose it is."""
        names = self._names
        for name in outputs.names:
            names[name.row] = name
        rows, token_ids = outputs.rows.tolist(), outputs.token_ids.tolist()
        return [(names[row], token_id) for row, token_id in zip(rows, token_ids, strict=True)]

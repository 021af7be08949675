"""Outputs of a step: one type, from the scheduler over the wire to the client.

In steady decode each sequence has one token and no other output. Such sequences are entries in two
columns, named by their row. A sequence with other output, such as an end or log-probabilities, has
a `SequenceUpdate` instead. The way of a token:

    StepResult       the device's answer                             runner/steps.py
      StepOutputs    made by the fourth door                         scheduler/core/step_results.py
        StepOutputs  each client's part, over its socket             engine/wire/core_server.py
          text       detokenised, ended by stop strings              engine/client/output.py
            event    taken from a mailbox, written to the socket     serve/http/sse.py
"""

from typing import Self

import msgspec
import numpy as np

from quire.base.errors import GRAMMAR_FAILED, GRAMMAR_FAULT, REQUEST_FAILED
from quire.base.plan import Candidates, Float64, Int32, TokenValues
from quire.base.prefix import PrefixReport
from quire.base.settings.kv_transfer import HandedOver


class Failure(msgspec.Struct, frozen=True, gc=False):
    """The failure of a request. `code` is for programs (base/errors.py)."""

    code: str
    message: str

    @classmethod
    def of_request(cls, message: str) -> Self:
        """Return the failure of a request that cannot be satisfied."""
        is_grammar = message.startswith(GRAMMAR_FAULT)
        return cls(GRAMMAR_FAILED if is_grammar else REQUEST_FAILED, message)


class Finish(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The end of a sequence."""

    reason: str  # stop, length, abort, error, timeout, pinned or repetition
    # stop token id, or the stop string, which only the client can set; None for an end token
    stop_reason: int | str | None = None
    error: Failure | None = None  # set for the reasons error and timeout


# The end of a request that an operator, not its client, has cancelled.
CANCELLED = Finish("abort", "cancelled")


class BeamOutput(msgspec.Struct, frozen=True, gc=False):
    """One result of a beam search; results are ordered by descending score."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish: Finish


class SequenceUpdate(msgspec.Struct, gc=False, omit_defaults=True):
    """The output of one step for one sequence.

    Updates cannot be part of a reference cycle, so the garbage collector ignores them.
    """

    request_id: str
    index: int = 0  # number of the sequence in its request
    token_ids: list[int] = []
    finish: Finish | None = None
    candidates: list[Candidates] | None = None  # one entry for each of token_ids
    prompt_candidates: list[Candidates] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    beams: list[BeamOutput] | None = None  # all results of a beam search, which end its request
    prefix: PrefixReport | None = None  # the prompt's prefix hit; sent once
    num_draft_tokens: int = 0  # verified draft tokens; accepted ones are token_ids after the first
    pooled: Float64 | None = None  # pooled output of a pooling model's prompt
    handed_over: HandedOver | None = None  # blocks for another engine; sent with the end
    token_values: TokenValues | None = None  # of the tokens that the step computed


class RowName(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The sequence that holds a row from this step on."""

    row: int
    request_id: str
    index: int
    num_cached_tokens: int


def _no_ints() -> Int32:
    return np.empty(0, np.int32)


class StepOutputs(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """The outputs of one step; a client gets only the outputs of its own requests."""

    rows: Int32 = msgspec.field(default_factory=_no_ints)  # sequences with one token and no more
    token_ids: Int32 = msgspec.field(default_factory=_no_ints)  # their tokens, in parallel
    names: list[RowName] = []  # rows that a sequence took in this step
    details: list[SequenceUpdate] = []  # sequences with other output than one token

    def __bool__(self) -> bool:
        return bool(len(self.rows) or self.names or self.details)

    @property
    def finished(self) -> list[tuple[SequenceUpdate, Finish]]:
        """The updates of sequences that ended, each with its end."""
        return [(update, update.finish) for update in self.details if update.finish is not None]

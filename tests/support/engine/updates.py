"""The outputs of a core's steps, sequence by sequence."""

from collections.abc import Callable
from typing import Protocol

from quire.base.step_outputs import SequenceUpdate, StepOutputs
from quire.engine.client.output import StepReader

MAX_STEPS = 2000


class HasWork(Protocol):
    @property
    def has_work(self) -> bool: ...


def read(reader: StepReader, outputs: StepOutputs) -> list[SequenceUpdate]:
    """One update for each sequence that got something, also if that is a token alone."""
    plain = [
        SequenceUpdate(
            name.request_id, name.index, [token], num_cached_tokens=name.num_cached_tokens
        )
        for name, token in reader.tokens(outputs)
    ]
    return plain + outputs.details


def run_to_end(owner: HasWork, step: Callable[[], object]) -> None:
    """Take steps until a core or a scheduler has no work."""
    for _ in range(MAX_STEPS):
        if not owner.has_work:
            return
        step()
    raise AssertionError("a request starves")


def reason_of(update: SequenceUpdate) -> str | None:
    """Why a sequence ended; None: it goes on."""
    return None if update.finish is None else update.finish.reason


def code_of(update: SequenceUpdate) -> str:
    """The code of what went wrong; empty if nothing did."""
    error = None if update.finish is None else update.finish.error
    return "" if error is None else error.code


def error_of(update: SequenceUpdate) -> str:
    """What went wrong; empty if nothing did."""
    error = None if update.finish is None else update.finish.error
    return "" if error is None else error.message

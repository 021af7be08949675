"""Events: decisions that changed something, in the order in which they were made.

Metrics, traces, records and time lines are subscribers of this one stream. A step in which
nothing but decoding happened is one event, `Planned`.
"""

from dataclasses import dataclass

from quire.base.plan import Int32, Plan
from quire.base.prefix import PrefixReport


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """plan: what was planned, for those who want to know who computes how much."""

    step_id: int
    num_rows: int
    num_tokens: int
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Queued(Event):
    """received_s: when the front end got the request; 0.0 is not known. has_grammar: it waits for
    that first."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None = None
    received_s: float = 0.0
    tenant: str = ""
    has_grammar: bool = False


@dataclass(frozen=True, slots=True)
class GrammarTaken(Event):
    """A request's grammar is compiled: from now on it waits as others do."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Appended(Event):
    """A piece of a prompt came."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A sequence got a row. index: which of its request's it is; those above 0 are forked from
    another row, or come back after a preemption."""

    request_id: str
    row: int
    num_cached_tokens: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class PrefixFound(Event):
    """How much of a new request's prompt was in the cache, and why not more."""

    request_id: str
    report: PrefixReport


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """swapped: to host memory; otherwise num_lost_tokens are computed again."""

    request_id: str
    for_request_id: str
    num_lost_tokens: int
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A request ended, with the last of its sequences. num_output_tokens: of all of them.

    Of a beam search what its client is told: tokens and number of its results, and how the best of
    them ended. told_at_once: it was told nothing before.
    """

    request_id: str
    reason: str
    num_output_tokens: int
    num_sequences: int = 1
    told_at_once: bool = False


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """A result was taken. rows: [N] those that got a token, in the numbering of `Admitted.row`,
    also of sequences which this very step ended. num_tokens: that the step computed; num_guessed:
    guesses among them, of num_drafts rows; accepted_at: how many rows got a token besides because
    their first guess was right, their second, and so on. duration_s: of the step on the device
    side."""

    step_id: int
    rows: Int32
    num_tokens: int
    duration_s: float
    num_drafts: int = 0
    num_guessed: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        """Tokens that came because guesses were right."""
        return sum(self.accepted_at)

"""Events: the scheduler's decisions that changed something, in order.

Metrics, traces, recordings and timelines subscribe to this one stream. A step that only decodes is
a single event, `Planned`.
"""

from dataclasses import dataclass

from quire.base.plan import Int32, Plan
from quire.base.prefix import PrefixReport


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """A step was planned."""

    step_id: int
    num_rows: int
    num_tokens: int
    plan: Plan | None = None  # the plan, for subscribers that need the tokens of each row


@dataclass(frozen=True, slots=True)
class Queued(Event):
    """A request entered the queue."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None = None
    received_s: float = 0.0  # time at which the front end got the request; 0.0 if unknown
    tenant: str = ""
    has_grammar: bool = False  # whether the request first waits for its grammar


@dataclass(frozen=True, slots=True)
class GrammarTaken(Event):
    """A request's grammar is compiled, so the request now waits in the queue."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Appended(Event):
    """A piece of an open prompt arrived."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A sequence got a row, by admission, by a fork of another row, or after a preemption."""

    request_id: str
    row: int
    num_cached_tokens: int
    index: int = 0  # number of the sequence in its request; forks have numbers above 0


@dataclass(frozen=True, slots=True)
class PrefixFound(Event):
    """The prefix hit of a new request's prompt, and the reason for the miss after it."""

    request_id: str
    report: PrefixReport


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """A sequence lost its row to another request."""

    request_id: str
    for_request_id: str
    num_lost_tokens: int  # tokens to recompute
    swapped: bool = False  # whether the blocks were copied to host memory instead


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A request ended, with the last of its sequences.

    For a beam search, the numbers and the reason cover the returned beams only.
    """

    request_id: str
    reason: str
    num_output_tokens: int  # output tokens of all sequences
    num_sequences: int = 1
    is_sent_whole: bool = False  # whether the client got all output at the end


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """The result of a step was taken."""

    step_id: int
    rows: Int32  # [N] rows that got a token, numbered as in `Admitted.row`
    num_tokens: int  # tokens that the step computed
    duration_s: float  # duration on the device's side
    num_drafts: int = 0  # rows with draft tokens
    num_draft_tokens: int = 0  # draft tokens among num_tokens
    accepted_at: tuple[int, ...] = ()  # rows that accepted the first draft token, the second, ...

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens of all rows."""
        return sum(self.accepted_at)

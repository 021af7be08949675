"""Events: the scheduler's decisions that changed something, in order.

Metrics, traces, recordings and timelines subscribe to this one stream. A step that only decodes is
a single event, `Planned`.
"""

from quire.base.plan import FrozenRecord, Int64, Plan
from quire.base.prefix import PrefixReport


class Event(FrozenRecord, frozen=True):
    at_s: float


class Planned(Event, frozen=True):
    """A step was planned."""

    step_id: int
    num_rows: int
    num_tokens: int
    plan: Plan | None = None  # the plan, for subscribers that need the tokens of each row


class Queued(Event, frozen=True):
    """A request entered the queue."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None = None
    received_s: float = 0.0  # time at which the front end got the request; 0.0 if unknown
    tenant: str = ""
    has_grammar: bool = False  # whether the request first waits for its grammar


class GrammarTaken(Event, frozen=True):
    """A request's grammar is compiled, so the request now waits in the queue."""

    request_id: str


class Appended(Event, frozen=True):
    """A piece of an open prompt arrived."""

    request_id: str
    num_tokens: int


class Admitted(Event, frozen=True):
    """A sequence got a row, by admission, by a fork of another row, or after a preemption."""

    request_id: str
    row: int
    num_cached_tokens: int
    index: int = 0  # number of the sequence in its request; forks have numbers above 0


class PrefixFound(Event, frozen=True):
    """The prefix hit of a new request's prompt, and the reason for the miss after it."""

    request_id: str
    report: PrefixReport


class Preempted(Event, frozen=True):
    """A sequence lost its row to another request."""

    request_id: str
    for_request_id: str
    num_lost_tokens: int  # tokens to recompute
    swapped: bool = False  # whether the blocks were copied to host memory instead


class Finished(Event, frozen=True):
    """A request ended, with the last of its sequences.

    For a beam search, the numbers and the reason cover the returned beams only.
    """

    request_id: str
    reason: str
    num_output_tokens: int  # output tokens of all sequences
    num_sequences: int = 1
    is_sent_whole: bool = False  # whether the client got all output at the end


class Stepped(Event, frozen=True):
    """The result of a step was taken."""

    step_id: int
    rows: Int64  # [N] rows that got a token, numbered as in `Admitted.row`
    num_tokens: int  # tokens that the step computed
    duration_s: float  # duration on the device's side
    num_drafts: int = 0  # rows with draft tokens
    num_draft_tokens: int = 0  # draft tokens among num_tokens
    accepted_at: tuple[int, ...] = ()  # rows that accepted the first draft token, the second, ...

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens of all rows."""
        return sum(self.accepted_at)

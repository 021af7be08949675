"""Events: decisions that changed something, in the order in which they were made.

Metrics, traces, records and time lines are subscribers of this one stream. A step in which
nothing but decoding happened is one event, `Planned`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float


@dataclass(frozen=True, slots=True)
class Planned(Event):
    step_id: int
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Queued(Event):
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    request_id: str
    row: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    request_id: str
    for_request_id: str
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    request_id: str
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class StepWasUndone(Event):
    step_id: int
    error: str

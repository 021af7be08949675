"""Requests of a simulation, and their arrival times."""

from dataclasses import dataclass

from quire.base.messages import Control, Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams

STOP, OTHER = 1, 2  # tokens that a simulated row samples: the stop token, or any other


@dataclass(frozen=True)
class Arrival:
    """A request and its arrival time.

    It ends after `num_output` tokens, unless another limit ends it; the scheduler cannot know."""

    at_s: float
    request: Request
    num_output: int


@dataclass(frozen=True)
class Message:
    """A control message to every replica, and its arrival time."""

    at_s: float
    control: Control


def simulated_request(
    request_id: str,
    prompt_token_ids: list[int],
    max_tokens: int | None,
    tenant: str = "",
    priority: int = 0,
) -> Request:
    """Return a request that stops at the simulation's stop token."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return Request(
        request_id, prompt_token_ids, params, 0, (STOP,), tenant=tenant, priority=priority
    )

"""Requests of a simulation, and their arrival times."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.messages import Control, Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams

STOP, OTHER = 1, 2  # tokens that a simulated row samples: the stop token, or any other
FIRST_WORD = 3  # smallest token id in a prompt
SMALLEST_VOCABULARY = 16


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


def token_ids_of(parts: Sequence[tuple[int, int]], vocab_size: int) -> list[int]:
    """Return a prompt made of parts, each a name and a number of tokens.

    Parts with the same name have the same tokens, so that equal prefixes give prefix hits."""
    names = np.array([name & 0xFFFF_FFFF_FFFF for name, _ in parts], np.uint64)
    counts = np.array([count for _, count in parts], np.int64)
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    mixed = _scramble(_scramble(np.repeat(names, counts)) + within.astype(np.uint64))
    size = np.uint64(max(vocab_size, SMALLEST_VOCABULARY) - FIRST_WORD)
    found: list[int] = (mixed % size + np.uint64(FIRST_WORD)).tolist()
    return found


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of 64-bit numbers (the finalizer of SplitMix64)."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

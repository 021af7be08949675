"""Requests of a simulation, and when they come."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.messages import Control, Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams

STOP, OTHER = 1, 2  # what a simulated row samples: the end of its sequence, or a word
FIRST_WORD = 3  # the least id in a prompt
SMALLEST_VOCABULARY = 16


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes; it ends after num_output tokens, if nothing ends it before. The
    scheduler cannot know that number."""

    at_s: float
    request: Request
    num_output: int


@dataclass(frozen=True)
class Message:
    """A control message and when it comes, to every replica."""

    at_s: float
    control: Control


def simulated_request(
    request_id: str,
    prompt_token_ids: list[int],
    max_tokens: int | None,
    tenant: str = "",
    priority: int = 0,
) -> Request:
    """Make a request that stops at the simulation's stop token."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return Request(
        request_id, prompt_token_ids, params, 0, (STOP,), tenant=tenant, priority=priority
    )


def token_ids_of(parts: Sequence[tuple[int, int]], vocab_size: int) -> list[int]:
    """Make a prompt of parts, each a name and a number of tokens: parts of one name are the same
    tokens, wherever they stand, so that equal beginnings are found in the cache."""
    names = np.array([name & 0xFFFF_FFFF_FFFF for name, _ in parts], np.uint64)
    counts = np.array([count for _, count in parts], np.int64)
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    mixed = _scramble(_scramble(np.repeat(names, counts)) + within.astype(np.uint64))
    size = np.uint64(max(vocab_size, SMALLEST_VOCABULARY) - FIRST_WORD)
    found: list[int] = (mixed % size + np.uint64(FIRST_WORD)).tolist()
    return found


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread numbers over 64 bits (the finaliser of SplitMix64)."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

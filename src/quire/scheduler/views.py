"""Frozen views of the scheduler's state for other components, created on request."""

from dataclasses import dataclass

from quire.base.messages import Request
from quire.base.plan import Plan


@dataclass(frozen=True, slots=True)
class RequestView:
    """Unfinished request. num_cached_tokens: -1 before its first admission. rows: rows of its
    sequences; filling: rows among these whose sequences have no output yet. is_waiting: whether a
    sequence of it waits in the queue."""

    request: Request
    num_prompt_tokens: int
    arrival_s: float
    num_cached_tokens: int
    rows: tuple[int, ...]
    filling: tuple[int, ...]
    is_waiting: bool


@dataclass(frozen=True, slots=True)
class StoresView:
    """Numbers of blocks and bytes moved from and to stores. num_here: looked-up blocks that this
    engine already had, so that they were not moved."""

    num_fetched: int
    num_kept: int
    num_fetched_bytes: int
    num_kept_bytes: int
    num_here: int


@dataclass(frozen=True, slots=True)
class TierView:
    """Numbers of blocks copied to host memory, and loaded again as hits."""

    num_offloaded: int
    num_loaded: int


@dataclass(frozen=True, slots=True)
class PinsView:
    """Counters of pinned prefixes. num_blocks: pinned blocks of the fullest cache group."""

    num_pins: int
    num_blocks: int
    num_hits: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class RetainedView:
    """Numbers of retained sequences of ended requests, and of their tokens."""

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MediaView:
    """Counters of the encoder cache: slots, one per token, and encoded tokens and hits since the
    start."""

    num_slots: int
    num_used_slots: int
    num_encoded_tokens: int
    num_hits: int


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """State of the scheduler at one moment, for metrics and status pages.

    num_blocks: of the largest cache group. num_free_blocks: of the group with the lowest number.
    usage: share of the blocks that sequences hold, in the fullest group. plans: in flight, oldest
    first.
    """

    num_rows: int
    num_running: int
    num_waiting: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    usage: float
    pins: PinsView
    held: RetainedView
    tier: TierView | None
    stores: StoresView | None
    media: MediaView | None
    plans: tuple[Plan, ...]

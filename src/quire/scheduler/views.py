"""What others may see of the scheduler's state: frozen, and made only when it is asked for."""

from dataclasses import dataclass

from quire.base.messages import Request
from quire.base.plan import Plan


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that has not ended. num_cached_tokens: -1 before its first admission. rows: that
    its sequences hold; filling: those of them whose sequences have no output yet. is_waiting: some
    of them wait in the queue."""

    request: Request
    num_prompt_tokens: int
    arrival_s: float
    num_cached_tokens: int
    rows: tuple[int, ...]
    filling: tuple[int, ...]
    is_waiting: bool


@dataclass(frozen=True, slots=True)
class StoresView:
    """Blocks that came from stores and went there, and their bytes. num_here: of the blocks that
    requests were looked up for, those that this engine had already, so that nothing was moved."""

    num_fetched: int
    num_kept: int
    num_fetched_bytes: int
    num_kept_bytes: int
    num_here: int


@dataclass(frozen=True, slots=True)
class TierView:
    """Blocks that were copied to host memory and came back as hits."""

    num_offloaded: int
    num_loaded: int


@dataclass(frozen=True, slots=True)
class PinsView:
    """num_blocks: of the fullest cache group, that pins hold."""

    num_pins: int
    num_blocks: int
    num_hits: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class HeldView:
    """What is held: sequences of requests that have ended, and their tokens."""

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MediaView:
    """The encoder cache: slots, one per token, and what was encoded or found since the start."""

    num_slots: int
    num_used_slots: int
    num_encoded_tokens: int
    num_hits: int


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler's state at one moment, for those who count, show and tell.

    num_blocks: of the largest cache group; num_free_blocks: of the group that has the fewest.
    usage: share of the blocks that sequences hold, in the fullest group. plans: that are
    in flight, oldest first.
    """

    num_rows: int
    num_running: int
    num_waiting: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    usage: float
    pins: PinsView
    held: HeldView
    tier: TierView | None
    stores: StoresView | None
    media: MediaView | None
    plans: tuple[Plan, ...]

"""What the C++ core is told of keys and values and of a step's attention (csrc/attention.h). No
torch; memory is given by its address."""

from typing import NamedTuple

from quire.ops.host.native import needed_core
from quire.ops.host.native_types import CoreKV, CorePlan
from quire.ops.host.threads import num_threads
from quire.spec.cache_group import STEP, CacheGroup
from quire.spec.config_fields import MAX_COUNT

KV_FORMATS = ("float32", "bfloat16", "float16", "int8")  # of keys and values, by number


class StepAddresses(NamedTuple):
    """Where a step's lists stand, all int32: tables, whose rows are `table_stride` entries apart,
    query starts and context lengths of `num_rows` rows, and the tokens' ends, 0 without any."""

    tables: int
    table_stride: int
    query_starts: int
    context_lens: int
    num_rows: int
    ends: int = 0


def kv_layer(
    group: CacheGroup, num_blocks: int, block_size: int, kv_format: str, places: tuple[int, int]
) -> CoreKV:
    """Make what the core takes as a layer's keys and values, which stand at these places.
    kv_format: one of KV_FORMATS."""
    return needed_core().KvLayer(
        format=KV_FORMATS.index(kv_format),
        heads=group.num_kv_heads,
        num_blocks=num_blocks,
        block_size=block_size,
        head_dim=group.head_dim,
        keys=places[0],
        values=places[1],
    )


def cut_step(
    plan: CorePlan,
    step: StepAddresses,
    group: CacheGroup,
    queries_per_kv_head: int,
    block_size: int,
    *,
    split: bool = True,
    cascade: bool = True,
) -> None:
    """Cut a step's work in a cache group into parts. split, cascade: see CpuBackend."""
    plan.prepare(
        **step._asdict(),
        block_size=block_size,
        window=group.window or 0,
        ahead=_ahead(group),
        kv_heads=group.num_kv_heads,
        group=queries_per_kv_head,
        head_dim=group.head_dim,
        num_threads=num_threads(),
        split=split,
        cascade=cascade,
    )


def _ahead(group: CacheGroup) -> int:
    """Count the tokens behind a token that it sees, of those that there are."""
    if group.kind != STEP:
        return 0
    return MAX_COUNT if group.window is None else group.window - 1

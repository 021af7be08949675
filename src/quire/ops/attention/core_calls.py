"""Arguments of the C++ core for keys, values and a step's attention (csrc/attention.h). This module
does not need torch: memory is given by its address."""

from typing import NamedTuple

from quire.ops.host.native import needed_core
from quire.ops.host.native_types import CoreKV, CorePlan
from quire.ops.host.threads import num_threads
from quire.spec.cache_group import LATENT, STEP, CacheGroup, equal_parts
from quire.spec.config_fields import MAX_COUNT

KV_FORMATS = ("float32", "bfloat16", "float16", "int8", "fp8")  # by the core's number
MAX_PART_HEADS = 32  # heads sharing latent vectors that a thread computes together


class StepAddresses(NamedTuple):
    """Addresses of a step's int32 lists: tables, query starts, context lengths and the tokens' ends
    (0 for none). Rows of tables are `table_stride` entries apart; `num_rows` counts rows."""

    tables: int
    table_stride: int
    query_starts: int
    context_lens: int
    num_rows: int
    ends: int = 0


def kv_layer(
    group: CacheGroup,
    num_blocks: int,
    block_size: int,
    kv_format: str,
    addresses: tuple[int, int],
    num_values: int = 0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> CoreKV:
    """Return a layer's keys and values as the core's type. addresses: addresses of the keys and
    of the values. kv_format: one of KV_FORMATS. num_values: elements of a latent vector that are
    its value, 0 for layers without latent vectors. scales: divisors of stored fp8 keys and
    values."""
    return needed_core().KvLayer(
        format=KV_FORMATS.index(kv_format),
        heads=group.num_kv_heads,
        num_blocks=num_blocks,
        block_size=block_size,
        head_dim=group.head_dim,
        keys=addresses[0],
        values=addresses[1],
        num_values=num_values,
        key_scale=scales[0],
        value_scale=scales[1],
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
    """Cut a step's work in a cache group; store it in `plan`. split, cascade: see CpuBackend.

    The heads that share latent vectors are cut into parts, each like the queries of a KV head."""
    kv_heads = group.num_kv_heads
    if group.kind == LATENT:
        kv_heads = equal_parts(queries_per_kv_head, MAX_PART_HEADS)
        queries_per_kv_head //= kv_heads
    plan.prepare(
        **step._asdict(),
        block_size=block_size,
        window=group.kernel_window,
        num_later_seen=_num_later_seen(group),
        kv_heads=kv_heads,
        group=queries_per_kv_head,
        head_dim=group.head_dim,
        num_threads=num_threads(),
        split=split,
        cascade=cascade,
    )


def _num_later_seen(group: CacheGroup) -> int:
    """Return the maximum number of later tokens that a token of the group sees."""
    if group.kind != STEP:
        return 0
    return MAX_COUNT if group.window is None else group.window - 1

"""How the block memory of a cache group is laid out. No torch.

Shape legend: Y layers of a group, K KV heads, B blocks, P tokens per block, H head dim.
"""

from quire.spec.cache_group import STATE, STEP, CacheGroup

SCALE_BYTES = 4  # behind the H values of an int8 row


def kv_shape(
    group: CacheGroup, num_blocks: int, block_size: int, kv_format: str
) -> tuple[int, ...]:
    """Return [2, Y, K, B, P, H], of int8 with a row's scale behind it; of a group of states
    [1, Y, 1, B, 1, state_size]. All layers of a group that keeps nothing share one's."""
    if group.kind == STATE:
        return (1, len(group.layers), 1, num_blocks, 1, group.state_size)
    row = group.head_dim + (SCALE_BYTES if kv_format == "int8" else 0)
    num_layers = min(1, len(group.layers)) if group.kind == STEP else len(group.layers)
    return (2, num_layers, group.num_kv_heads, num_blocks, block_size, row)

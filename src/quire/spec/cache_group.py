"""Cache groups: what layers cache of a sequence, and which tokens of it must be cached.

To compute the token at position n, some of the tokens before it must be cached. Only the choice of
these tokens distinguishes the kinds of groups. Prefix hits, growth, the blocks that may be dropped,
and the blocks that a sequence holds all follow from it.

    full      all tokens before n
    latent    all tokens before n, with one vector in the place of keys and values
    window    the last w - 1 tokens before n
    chunked   the tokens before n in the same chunk of c tokens
    state     the last token before n; its block holds the state after it, not each token's part
    step      all tokens of the sequence, in the same step; nothing is cached

A block of a `state` group covers P tokens like other blocks, but holds a single state. While the
block is not full, the state is the one after the sequence's last token, and is updated in place.
Afterwards it stays the state at the block's end. So a sequence holds few of these blocks, and a
prefix hit needs one. In a `step` group tokens attend in both directions. Its blocks only count
tokens and have no memory: a step computes the whole prompt, and then the sequence ends.
"""

from dataclasses import dataclass, replace

FULL, WINDOW, CHUNKED, LATENT, STATE = "full", "window", "chunked", "latent", "state"
STEP = "step"
KINDS = (FULL, WINDOW, CHUNKED, LATENT, STATE, STEP)
GPU_INT8_LAYOUT = 2  # version of int8 blocks on a GPU; raised when their bytes change
MAX_RETAINED_STATES = 2  # maximum per prompt: at its end, and where other prompts diverge from it


def equal_parts(num_heads: int, max_heads: int) -> int:
    """Return the smallest number of equal parts with at most `max_heads` heads each.

    Kernels compute the query heads that share latent vectors in such parts."""
    first = -(-num_heads // max_heads)
    return next(parts for parts in range(first, num_heads + 1) if num_heads % parts == 0)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same kind of thing and share one block table per sequence."""

    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int = 0
    head_dim: int = 0
    # tokens of the window or chunk; in a `step` group tokens less than this apart see each other
    window: int | None = None
    state_size: int = 0  # elements of one layer's state

    def first_needed(self, num_tokens: int) -> int:
        """Return the first token that must be cached to compute the token at index `num_tokens`.

        Return `num_tokens` itself if no token is needed."""
        if self.kind == WINDOW:
            return max(0, num_tokens - self._span + 1)
        if self.kind == CHUNKED:
            return num_tokens - num_tokens % self._span
        if self.kind == STATE:
            return max(0, num_tokens - 1)
        return 0

    def after(self, num_layers: int) -> "CacheGroup":
        """Return this group with its layers renumbered to follow `num_layers` other layers."""
        return replace(self, layers=tuple(num_layers + layer for layer in self.layers))

    @property
    def kernel_window(self) -> int:
        """Return the window as kernels take it. It is below 0 for chunks of so many tokens, and 0
        if a token attends to all earlier ones."""
        return -self._span if self.kind == CHUNKED else self.window or 0

    @property
    def keeps_all(self) -> bool:
        """Whether all tokens stay needed until the sequence ends."""
        return self.kind in (FULL, LATENT, STEP)

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int = 0) -> int:
        """Return the maximum number of blocks that a sequence of `num_tokens` holds at any time.

        chunk: tokens computed per step; 0 for one token."""
        blocks = -(-num_tokens // block_size)
        if self.keeps_all:
            return blocks
        if self.kind == STATE:  # the block that is read, the retained states, and the last block
            return min(blocks, 2 + (MAX_RETAINED_STATES if chunk else 0))
        new = -(-chunk // block_size)
        return min(blocks, -(-self._span // block_size) + 1 + new)

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of a block in all layers of the group.

        A block holds keys and values of `block_size` tokens, a state, or nothing."""
        if self.kind == STEP:
            return 0
        if self.kind == STATE:
            return len(self.layers) * self.state_size * max(4, dtype_bytes)
        token = self.vectors * self.num_kv_heads * self.head_dim * dtype_bytes
        return len(self.layers) * token * block_size

    def stored_block_bytes(self, block_size: int, dtype_bytes: int, kv_format: str) -> int:
        """Return the bytes of a block whose keys and values are stored in `kv_format`.

        `auto` is the model's dtype of `dtype_bytes`. `int8` adds a float32 scale to each token's
        vector; `fp8` has no scales. The format does not apply to states."""
        if self.kind != STATE and kv_format == "int8":
            scales = self.block_bytes(block_size, 4) // self.head_dim
            return self.block_bytes(block_size, 1) + scales
        if self.kind != STATE and kv_format == "fp8":
            return self.block_bytes(block_size, 1)
        return self.block_bytes(block_size, dtype_bytes)

    def memory_shape(self, num_blocks: int, block_size: int, kv_format: str) -> tuple[int, ...]:
        """Return [2, layers, KV heads, blocks, tokens, head dim]; [1, ...] for a latent group. An
        int8 row has 4 more bytes, for its float32 scale. On a GPU the scales of a block follow all
        of its rows. A group of states has [1, layers, 1, blocks, 1, state_size]. All layers of a
        group that keeps nothing share one layer's."""
        if self.kind == STATE:
            return (1, len(self.layers), 1, num_blocks, 1, self.state_size)
        row = self.head_dim + (4 if kv_format == "int8" else 0)
        num_layers = min(1, len(self.layers)) if self.kind == STEP else len(self.layers)
        return (self.vectors, num_layers, self.num_kv_heads, num_blocks, block_size, row)

    @property
    def vectors(self) -> int:
        """Vectors per token and head: a key and a value, or one latent vector."""
        return 1 if self.kind == LATENT else 2

    @property
    def _span(self) -> int:
        assert self.window, f"a group of kind {self.kind} needs its length"
        return self.window

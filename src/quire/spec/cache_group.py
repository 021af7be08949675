"""What layers keep of a sequence, and how much of it must be there: the contract of cache groups.

To compute the token at position n of a sequence, the blocks of some last tokens before it must be
there. Which those are is all that tells the kinds apart; hits, growth, what may be dropped, and how
much a sequence holds follow from it.

    full      all of them
    latent    all of them, one vector in the place of keys and values
    window    the last w - 1
    chunked   those since the chunk of c tokens began in which n is
    state     the last one: its block holds the layers' state behind it, not each token's part
    step      all of them, and all behind it, by the same step: nothing is kept

A block of a `state` group stands for P tokens as the others' do, but holds one state. As long as
the last of these tokens is not there, that is the state behind the sequence's last token, written
in place; then, for good, the one behind the block. So a sequence holds few of them, and a hit needs
one. Blocks of a `step` group, in which tokens see each other in both directions, only count tokens
and take no memory: a prompt is computed whole, in one step, and then it ends.
"""

from dataclasses import dataclass, replace

FULL, WINDOW, CHUNKED, LATENT, STATE = "full", "window", "chunked", "latent", "state"
STEP = "step"
KINDS = (FULL, WINDOW, CHUNKED, LATENT, STATE, STEP)
KEPT_STATES = 2  # at most, of a prompt: behind its end, and where others parted from it


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same kind of thing and so share one block table per sequence.

    window: tokens of the window, or of a chunk; of a `step` group a token sees those that are less
    than so many away, on both sides. state_size: elements of a layer's state.
    """

    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    state_size: int = 0

    def first_needed(self, num_tokens: int) -> int:
        """Return the first token that must be there to compute the one behind so many tokens;
        num_tokens itself where that needs none."""
        if self.kind == WINDOW:
            return max(0, num_tokens - self._span + 1)
        if self.kind == CHUNKED:
            return num_tokens - num_tokens % self._span
        if self.kind == STATE:
            return max(0, num_tokens - 1)
        return 0

    def behind(self, num_layers: int) -> "CacheGroup":
        """Return the same group of layers whose numbers are behind so many others."""
        return replace(self, layers=tuple(num_layers + layer for layer in self.layers))

    @property
    def keeps_all(self) -> bool:
        """Whether all tokens are needed until the sequence ends."""
        return self.kind in (FULL, LATENT, STEP)

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int = 0) -> int:
        """Return the most blocks that a sequence of so many tokens holds at any time. chunk: how
        many it takes in at once, if not one."""
        blocks = -(-num_tokens // block_size)
        if self.keeps_all:
            return blocks
        if self.kind == STATE:  # the one that is read, those that are kept, and the last
            return min(blocks, 2 + (KEPT_STATES if chunk else 0))
        new = -(-chunk // block_size)
        return min(blocks, -(-self._span // block_size) + 1 + new)

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of a block in all layers of the group: keys and values of `block_size`
        tokens, a state, or nothing."""
        if self.kind == STEP:
            return 0
        if self.kind == STATE:
            return len(self.layers) * self.state_size * max(4, dtype_bytes)
        vectors = 1 if self.kind == LATENT else 2
        token = vectors * self.num_kv_heads * self.head_dim * dtype_bytes
        return len(self.layers) * token * block_size

    def stored_block_bytes(self, block_size: int, dtype_bytes: int, kv_format: str) -> int:
        """Return the same of keys and values that are stored in a format: `auto` is the model's
        dtype, of so many bytes, `int8` has a float32 scale with each token's vector, `fp8` has
        none. States are never rounded to one."""
        if self.kind != STATE and kv_format == "int8":
            scales = self.block_bytes(block_size, 4) // self.head_dim
            return self.block_bytes(block_size, 1) + scales
        if self.kind != STATE and kv_format == "fp8":
            return self.block_bytes(block_size, 1)
        return self.block_bytes(block_size, dtype_bytes)

    def memory_shape(self, num_blocks: int, block_size: int, kv_format: str) -> tuple[int, ...]:
        """Return [2, layers, KV heads, blocks, tokens, head dim]; an int8 row has its float32 scale
        after it. A group of states has [1, layers, 1, blocks, 1, state_size]. All layers of a group
        that keeps nothing share one layer's."""
        if self.kind == STATE:
            return (1, len(self.layers), 1, num_blocks, 1, self.state_size)
        row = self.head_dim + (4 if kv_format == "int8" else 0)
        num_layers = min(1, len(self.layers)) if self.kind == STEP else len(self.layers)
        return (2, num_layers, self.num_kv_heads, num_blocks, block_size, row)

    @property
    def _span(self) -> int:
        assert self.window, f"a group of kind {self.kind} needs its length"
        return self.window

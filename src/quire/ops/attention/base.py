"""Interface of attention backends (P 4.1, T 4.2.2).

Shape legend: T tokens of the step, S scheduled rows, N query heads, K KV heads, H head dim, B
blocks of a group's pool, P tokens per block, L longest block table of the step (in latent
attention, elements of a latent vector).

A step concatenates the tokens of S rows. Row s has `query_lens[s]` tokens; the last of them has
position `context_lens[s] - 1` in its sequence. The row's block table lists the blocks with its keys
and values: position p is in block `table[p // P]` at offset `p % P`.
A token at position i attends to positions j with `max(0, i - window + 1) <= j <= i`, or in a
chunked group `i - i % window <= j <= i`. If it has an end after i, it attends up to `j < end`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import ConfigError
from quire.ops.attention_inputs import AttentionStep, DeltaHeads, Int32, Scores
from quire.ops.blocks.host_blocks import HostBlocks
from quire.ops.norms import rms_norm
from quire.ops.rotary import rotary
from quire.spec.cache_group import CHUNKED, LATENT, CacheGroup


class Part(NamedTuple):
    """Attention over some of the keys, to be merged with attention over the others. out: weighted
    values [T, N, H]. log_sums: logarithms [T, N] of the sums of e^score that `out` was divided by.
    Both have the accumulation dtype."""

    out_TNH: torch.Tensor
    log_sums_TN: torch.Tensor


# Makes keys [C, N, H] and values [C, N, num_values] of C latent vectors, [C, L].
Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class AttentionBackend(ABC):
    """Interface of attention backends. `prepare` is called once per step. Then each layer calls
    `write` (or `rotary_write`), and `run` after it; `rotary_run` does both.

    Each layer writes all keys and values of a step before it reads any, unless the step
    `is_separate`. So rows of one step may read blocks that other rows of the same step write.

    can_be_recorded: whether a graph can hold the backend's launches. They depend on the host's
    lengths only in how `run` cuts the work. Slot -1 writes nothing, and rows may have no tokens.
    takes_any_lengths: whether `run`, too, needs only three numbers from the host: the number of
    rows, the total number of tokens, and the longest context.
    """

    name: str
    can_be_recorded = False
    takes_any_lengths = False

    @property
    def has_states(self) -> bool:
        """Return whether layers have states, which a recorded step with draft tokens settles."""
        return False

    @property
    def needs_separate(self) -> bool:
        """Return whether recorded decoding steps rely on `is_separate`."""
        return False

    def prefers_uncut(self, context_lens: Int32) -> bool:
        """Return whether a step of rows with one new token each is better run with `is_uncut`.
        context_lens: [S]. The answer may depend on earlier steps, as some layouts are known then.
        """
        return False

    @abstractmethod
    def prepare(self, step: AttentionStep) -> None:
        """Accept a step's metadata. May launch device work, but never waits for it."""

    @abstractmethod
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store this step's keys and values, [T, K, H] each, in the layer's blocks."""

    @abstractmethod
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return attention of the step's queries, [T, N, H], written to `out` if given. A query's
        result is the sum of weight[j] v[j] over the positions j that it attends to (see Scores)."""

    def run_part(self, layer: int, q_TNH: torch.Tensor, scores: Scores) -> Part:
        """Attend as `run` does, [T, N, H], but without sinks and only over this rank's part of the
        keys. Raises ConfigError if the backend does not support it."""
        raise ConfigError(
            f"attention_backend {self.name} cannot share a sequence's tokens with other ranks;"
            " remove decode_context_parallel_size."
        )

    def write_latent(self, layer: int, latent_TL: torch.Tensor) -> None:
        """Store this step's latent vectors, [T, L], in the blocks of the layer's latent group.
        Raises ConfigError in a backend without latent attention."""
        raise _has_no_latents(self)

    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """Return absorbed multi-head latent attention (DeepSeek-V2, section 2.1), [T, N,
        num_values], contiguous. All heads read the same vectors: a key is a whole latent vector,
        and its value the vector's first `num_values` elements. Call `write_latent` before it.
        Raises ConfigError in a backend without latent attention."""
        raise _has_no_latents(self)

    def prefers_expanded(self, min_tokens: int) -> bool:
        """Return whether to attend by `run_expanded` instead of `run_latent` in the prepared step.
        min_tokens: new tokens per row from which that takes fewer products."""
        return False

    def run_expanded(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, expand: Expand, num_values: int
    ) -> torch.Tensor:
        """Attend with keys and values that `expand` makes of the cached latent vectors; return
        [T, N, num_values], contiguous. Needed only if `prefers_expanded` may be true."""
        raise _has_no_latents(self)

    def prepare_states(self, step: AttentionStep) -> None:
        """Prepare a step that runs only layers with states. Call it after the previous step's
        layers, when keys and values of the step's tokens are already stored."""
        raise _keeps_no_states(self)

    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """Convolve each of C channels along its sequence with its own weights, then apply SiLU;
        [T, C] in x's dtype:

            made[t] = sum over w of weight[w] x[t - W + 1 + w]

        The layer's state (states.py) holds the inputs before the step's tokens. Raises ConfigError
        in a backend without states.
        """
        raise _keeps_no_states(self)

    def delta_rule(
        self,
        layer: int,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        rate_N: torch.Tensor,
        shift_N: torch.Tensor,
        heads: DeltaHeads,
    ) -> torch.Tensor:
        """Read and correct each value head's memory M [D, E], the layer's state, token by token
        (Gated Delta Networks, Yang et al. 2025). Return [T, N, E] in qkv's dtype:

            M = e^(-rate softplus(time + shift)) M
            M = M + k (sigmoid(strength) (v - M^T k))^T
            out = M^T q

        Keys are scaled to length 1 and queries to length 1 / sqrt(D); 1e-6 is added to squared
        lengths.
        qkv: concatenated queries, keys and values of all heads. gates: G = 2 N, strengths and then
        times. rate, shift: of the accumulation dtype. Raises ConfigError as `convolve` does.
        """
        raise _keeps_no_states(self)

    @abstractmethod
    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy whole blocks within a group, in all of its layers, as one operation."""

    @abstractmethod
    def swap_out(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy device blocks of a group to blocks of host memory."""

    @abstractmethod
    def load(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy blocks of host memory to device blocks of a group."""

    def rotary_write(
        self,
        layer: int,
        qkv_TMH: torch.Tensor,
        num_kv_heads: int,
        rotary_rows: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values, and return the queries,
        [T, N, H]. qkv: M = N + 2 K heads. weight: norm weights [N + K, H], or None without norms.
        rotary_rows: from `rotary_rows`. Backends may fuse all of this in one operation."""
        num_turned = qkv_TMH.shape[1] - num_kv_heads
        qk_TMH, v_TKH = qkv_TMH.split([num_turned, num_kv_heads], dim=1)
        if weight is not None:
            qk_TMH = rms_norm(qk_TMH, weight, eps)
        sizes = [num_turned - num_kv_heads, num_kv_heads]
        q_TNH: torch.Tensor
        q_TNH, k_TKH = rotary(qk_TMH, rotary_rows).split(sizes, dim=1)
        self.write(layer, k_TKH, v_TKH)
        return q_TNH

    def rotary_run(
        self,
        layer: int,
        qkv_TMH: torch.Tensor,
        num_kv_heads: int,
        rotary_rows: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        scores: Scores,
    ) -> torch.Tensor:
        """Return `run` after `rotary_write`, [T, N, H]. A backend may do both in one launch if the
        rows of the step are separate."""
        q_TNH = self.rotary_write(layer, qkv_TMH, num_kv_heads, rotary_rows, weight, eps)
        return self.run(layer, q_TNH, scores)

    @property
    def host_blocks(self) -> HostBlocks | None:
        """Host-memory blocks by group, which stores read and write; None if the backend does not
        expose them."""
        return None


class ForwardingBackend(AttentionBackend):
    """Backend that forwards every call to `inner`. Subclasses override some of the calls."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner

    @property
    def has_states(self) -> bool:
        """See AttentionBackend."""
        return self.inner.has_states

    @property
    def needs_separate(self) -> bool:
        """See AttentionBackend."""
        return self.inner.needs_separate

    def prefers_uncut(self, context_lens: Int32) -> bool:
        """See AttentionBackend."""
        return self.inner.prefers_uncut(context_lens)

    def prepare(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        self.inner.prepare(step)

    def prepare_states(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        self.inner.prepare_states(step)

    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """See AttentionBackend."""
        self.inner.write(layer, k_TKH, v_TKH)

    def rotary_write(self, *given: Any) -> torch.Tensor:
        """See AttentionBackend."""
        return self.inner.rotary_write(*given)

    def rotary_run(self, *given: Any) -> torch.Tensor:
        """See AttentionBackend. Subclasses with a `run` of their own call it here, too."""
        return self.inner.rotary_run(*given)

    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self.inner.run(layer, q_TNH, scores, out_TNH)

    def run_part(self, layer: int, q_TNH: torch.Tensor, scores: Scores) -> Part:
        """See AttentionBackend."""
        return self.inner.run_part(layer, q_TNH, scores)

    def write_latent(self, layer: int, latent_TL: torch.Tensor) -> None:
        """See AttentionBackend."""
        self.inner.write_latent(layer, latent_TL)

    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self.inner.run_latent(layer, q_TNL, scores, num_values)

    def prefers_expanded(self, min_tokens: int) -> bool:
        """See AttentionBackend."""
        return self.inner.prefers_expanded(min_tokens)

    def run_expanded(self, *given: Any) -> torch.Tensor:
        """See AttentionBackend."""
        return self.inner.run_expanded(*given)

    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        return self.inner.convolve(layer, x_TC, weight_CW)

    def delta_rule(self, *given: Any) -> torch.Tensor:
        """See AttentionBackend."""
        return self.inner.delta_rule(*given)

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """See AttentionBackend."""
        self.inner.copy_blocks(group, source, destination)

    def swap_out(self, group: int, source: Int32, destination: Int32) -> None:
        """See AttentionBackend."""
        self.inner.swap_out(group, source, destination)

    def load(self, group: int, source: Int32, destination: Int32) -> None:
        """See AttentionBackend."""
        self.inner.load(group, source, destination)

    @property
    def host_blocks(self) -> HostBlocks | None:
        """See AttentionBackend."""
        return self.inner.host_blocks


@dataclass(frozen=True)
class KVLayout:
    """Cache groups of a backend's KV tensors, with their sizes and formats.

    num_blocks: blocks of each group. dtype: dtype of queries and results.
    kv_format: storage of keys and values. `auto` stores them in dtype, `int8` with a float32 scale
    per token and head, `fp8` as e4m3 with two given scales per layer.
    num_host_blocks: blocks in host memory by group; empty for as many as on the device.
    given: existing memory for the blocks of each group, as bytes.
    """

    groups: tuple[CacheGroup, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kv_format: str = "auto"
    num_host_blocks: tuple[int, ...] = ()
    given: tuple[npt.NDArray[np.uint8], ...] = ()

    def group_of_layer(self) -> dict[int, int]:
        return {layer: g for g, group in enumerate(self.groups) for layer in group.layers}


def first_seen(group: CacheGroup, positions: torch.Tensor) -> torch.Tensor | None:
    """Return the first position that the token at each position attends to, [...]; it may be below
    0. None if tokens of the group attend to all earlier ones. positions: [...]."""
    if group.window is None:
        return None
    if group.kind == CHUNKED:
        return positions - positions % group.window
    return positions - group.window + 1


def _keeps_no_states(backend: AttentionBackend) -> ConfigError:
    return ConfigError(
        f"attention_backend {backend.name} cannot run models whose layers have states."
    )


def _has_no_latents(backend: AttentionBackend) -> ConfigError:
    return ConfigError(
        f"attention_backend {backend.name} cannot run models with latent attention; remove"
        " attention_backend to use one that can."
    )


def why_no_latents(layout: KVLayout) -> str | None:
    """Return the reason why a backend without latent attention cannot serve the layout."""
    has_latents = any(group.kind == LATENT for group in layout.groups)
    return "it has no latent attention" if has_latents else None


def refuse_kv_format(backend: str, layout: KVLayout) -> None:
    """Raise ConfigError if the layout does not store keys and values in its dtype."""
    if layout.kv_format != "auto":
        raise ConfigError(
            f"attention_backend {backend} stores keys and values in the model's dtype, not as"
            f" {layout.kv_format}. Use cpu (on a CPU, with the C++ core) or triton (on a GPU)."
        )

"""The inputs of the benchmark: shapes of two models, sizes of the workloads, prompts of random
tokens.

Standard library only: the drivers import it in environments of their own.
"""

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A model's sizes; the embedding is the head, too."""

    name: str
    model_type: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int

    @property
    def layer_weights(self) -> int:
        """Elements of all linear layers but the head."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """In 16 bits."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentShape(Shape):
    """DeepSeek-V2-Lite's sizes: latent attention, and experts in all layers but the first.

    head_dim: half the numbers of a key and a value. intermediate: of the first layer. inner: of an
    expert. num_used: experts that a token multiplies, with the shared ones.
    """

    rank: int = 512
    rotated: int = 64
    plain: int = 128
    value: int = 128
    inner: int = 1408
    num_experts: int = 64
    num_used: int = 8

    @property
    def layer_weights(self) -> int:
        """Elements that one token multiplies in all layers."""
        attention = self.hidden * (self.num_heads * (self.plain + self.rotated + self.value))
        attention += self.rank * self.num_heads * (self.plain + self.value)
        attention += self.hidden * (self.rank + self.rotated)
        routed = self.hidden * (3 * self.inner * self.num_used + self.num_experts)
        dense = 3 * self.hidden * self.intermediate
        return self.num_layers * attention + (self.num_layers - 1) * routed + dense

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * (self.rank + self.rotated)


QWEN = Shape("qwen3-0.6b", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936)
TINY = Shape("llama-8m", "llama", 288, 6, 6, 6, 48, 768, 8192)
LITE = LatentShape("deepseek-v2-lite", "deepseek_v2", 2048, 27, 16, 16, 160, 10944, 102400)
SHAPES = {shape.name: shape for shape in (QWEN, TINY)}


@dataclass(frozen=True)
class Workload:
    """num_requests prompts of `shared` equal and `own` different tokens, output_len tokens each.

    repeats: runs in one process, after one that warms up.
    """

    name: str
    shape: Shape
    num_requests: int
    shared: int
    own: int
    output_len: int
    repeats: int = 1

    @property
    def max_len(self) -> int:
        return self.shared + self.own + self.output_len

    @property
    def num_tokens(self) -> int:
        """Of prompts and outputs, if nothing is shared."""
        return self.num_requests * self.max_len


WORKLOADS = [
    Workload("start", QWEN, 1, 0, 16, 1),
    Workload("single", QWEN, 1, 0, 128, 64, repeats=2),
    Workload("batch", QWEN, 16, 0, 128, 64),
    Workload("shared", QWEN, 16, 512, 32, 32),
    Workload("prefill", QWEN, 1, 0, 1024, 1, repeats=2),
    Workload("rows", QWEN, 64, 0, 128, 64),
    Workload("long", QWEN, 1, 0, 8192, 33),
    Workload("tiny", TINY, 1, 0, 128, 64, repeats=10),
]
# The same with fewer tokens, so that five rounds of a dozen engines take less than an hour.
SHORT = [
    Workload("single", QWEN, 1, 0, 128, 24),
    Workload("prefill", QWEN, 1, 0, 1024, 1),
    Workload("batch", QWEN, 16, 0, 32, 16),
    Workload("shared", QWEN, 8, 128, 8, 8),
    Workload("rows", QWEN, 64, 0, 8, 8),
    Workload("long", QWEN, 1, 0, 2048, 9),
    Workload("tiny", TINY, 1, 0, 128, 64, repeats=10),
]
LATENT = "latent"
DEEPSEEK = Workload(LATENT, LITE, 1, 0, 4096, 33)
SMALL_DEEPSEEK = replace(
    DEEPSEEK, shape=replace(LITE, name="deepseek-v2-lite-3", num_layers=3), own=256
)


@dataclass(frozen=True)
class Metric:
    """A result of a workload's run. head: in a table; title: below it."""

    name: str
    workload: str
    head: str
    title: str
    digits: int = 1
    is_rate: bool = True

    def best(self, values: list[float]) -> float:
        return max(values) if self.is_rate else min(values)

    def gain(self, value: float, other: float) -> float:
        """Return how many times as good as another value this value is."""
        return value / other if self.is_rate else other / value


METRICS = [
    Metric("ttft_s", "single", "TTFT s", "one request of 128 tokens: time to its first", 3, False),
    Metric("decode_rate", "single", "decode", "the same: its other 63 tokens, per second"),
    Metric("prefill_rate", "prefill", "prefill", "one prompt of 1,024 tokens, per second", 0),
    Metric(
        "batch_rate", "batch", "16 rows", "16 x 128 in, 64 out at once: output tokens per second"
    ),
    Metric("cold_rate", "shared", "cold", "16 x (512 shared + 32) in, 32 out, prefix never seen"),
    Metric("warm_rate", "shared", "warm", "the same prefix again, with other endings"),
    Metric("rows_rate", "rows", "64 rows", "64 x 128 in, 64 out at once: output tokens per second"),
    Metric("long_rate", "long", "8,192 in", "one prompt of 8,192 tokens, per second", 0),
    Metric("deep_rate", "long", "behind", "the same: its other 32 tokens, per second"),
    Metric("tiny_ms", "tiny", "tiny ms", "Llama of 8.3 M weights: time per output token", 3, False),
    Metric("start_s", "start", "start s", "from the command to the first token of 16", 2, False),
    Metric("above_mib", "batch", "RSS MiB", "peak memory above weights and KV (16 rows)", 0, False),
]
LATENT_METRICS = [
    Metric("long_rate", LATENT, "4,096 in", "prompt of 4,096 tokens, tokens per second", 1),
    Metric("deep_rate", LATENT, "after", "32 tokens after it, per second", 2),
]


def chosen_workload(name: str, is_small: bool, is_short: bool = False) -> Workload:
    """Return a workload. is_small: with the small model, to test the benchmark itself."""
    if name == LATENT:
        return SMALL_DEEPSEEK if is_small else DEEPSEEK
    listed = SHORT if is_short else WORKLOADS
    (found,) = [workload for workload in listed if workload.name == name]
    return replace(found, shape=TINY) if is_small else found


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Return ids drawn uniformly from the lower half of the vocabulary, which has no special
    tokens."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size // 2) for _ in range(length)]

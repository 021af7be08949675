"""Sizes at which a GPU's steps are recorded, and what the graphs take. No torch: `quire fit` plans
with them."""

from quire.base.config import EngineConfig
from quire.base.model_spec import DTYPE_BYTES, ModelSpec
from quire.runner.memory_plan import workspace_bytes

MIXED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MIXED_ROWS = (4, 32, 128)  # and all rows
MOST_MIXED = 32  # kinds
GRAPH_BYTES = 4 << 20  # of a graph beside its tensors: nodes and parameters


def ladder(max_rows: int) -> list[int]:
    """Return sizes up to max_rows, none of which has more than 16 rows too many, or twice as
    many."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_rows + 16, 16)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def most_mixed_tokens(max_rows: int) -> int:
    """Count the tokens of the largest mixed step that is recorded."""
    return max(MIXED_TOKENS[-1], max_rows)


def all_graphs_bytes(max_rows: int, tensors_bytes: int) -> int:
    """Return what all graphs take, if the largest one's tensors, which the others share, take so
    much."""
    return tensors_bytes + GRAPH_BYTES * (len(ladder(max_rows)) + MOST_MIXED)


def estimated_graph_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Estimate what graphs take, from the model's shape, on a GPU. config: with all derived values
    filled in."""
    num_rows = config.scheduler.max_num_seqs
    assert num_rows
    if config.enforce_eager:
        return 0
    size, tokens = DTYPE_BYTES[config.model.dtype], most_mixed_tokens(num_rows)
    return all_graphs_bytes(num_rows, workspace_bytes(spec, size, tokens, num_rows))

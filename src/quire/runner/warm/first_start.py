"""Run plain plans of a start with torch as later starts run them: by the core, on arrays.

The whole runner's programs are used, so weights and blocks are the same memory. A plain step takes
less time on the host without torch's tensors.
"""

from typing import TYPE_CHECKING

import torch

from quire.base.settings.config import EngineConfig
from quire.models.checkpoint.source import ModelSource
from quire.models.model import Model
from quire.models.registry import OWN
from quire.ops.trace.program import Untraceable, here
from quire.runner.native_model import NativeModel
from quire.runner.warm.blocks import WarmBlocks
from quire.runner.warm.conditions import can_save_start, path_for
from quire.runner.warm.model import WarmModel
from quire.runner.warm.warm_runner import PlainPrograms, WarmRunner

if TYPE_CHECKING:
    from quire.runner.setup.built import BuiltRunner


def without_torch(
    config: EngineConfig, source: ModelSource, built: "BuiltRunner"
) -> WarmModel | None:
    """Return a loaded model that runs plain plans without torch, and all other plans by this
    runner. Return None if steps of such settings need torch. config: as given."""
    native = built.runner.model
    if not isinstance(native, NativeModel) or not isinstance(native.model, Model):
        return None
    path = path_for(config, source, has_torch=True)
    if (
        path is None
        or not can_save_start(built.spec)
        or built.host_limits is not None
        or built.spec.model_type not in OWN
    ):
        return None  # the head of a plug-in's model may do more than the core's operations
    try:
        programs = _traced_programs(native)
    except Untraceable:
        return None
    cache = built.config.cache
    blocks = WarmBlocks(
        built.spec.cache_groups,
        built.memory.num_blocks,
        cache.block_size,
        built.config.model.dtype,
        cache.kv_cache_dtype,
        [each.view(-1).view(torch.uint8).numpy() for each in native.backend.blocks],
    )
    model = WarmModel(
        config,
        source,
        WarmRunner(programs, built.runner.rows.state.arrays, blocks),
        built.config,
        built.spec,
        built.memory,
        str(built.dtype),
        built.copy_bytes_per_s,
    )
    model.share_rows_with(built)
    return model


def _traced_programs(native: NativeModel) -> PlainPrograms:
    """Return the programs of a traced model. Raises Untraceable."""
    head, compiled = native.head, native.compiled
    return PlainPrograms(
        compiled.program,
        head.parts({}, here).assemble(native.backend.variant, lambda program: None, int),
        native.hidden_size,
        head.widths[0],
        [(group, heads) for group, heads in compiled.heads.items() if heads is not None],
        (native, head),
    )

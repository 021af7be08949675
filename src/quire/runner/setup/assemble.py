"""Assemble a runner from a model and a backend; the device selects the implementations."""

from collections.abc import Sequence

import torch

from quire.base.settings.config import EngineConfig
from quire.ops import gpu
from quire.ops.attention.base import AttentionBackend
from quire.ops.collective import ALONE, RankGroup
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.rows.row_arrays import RowArrays
from quire.ops.rows.row_state import RowTensors
from quire.runner.device import Device, HostDevice
from quire.runner.drafting.draft_steps import VerifyStep, device_runs
from quire.runner.gpu.cuda_device import CudaDevice
from quire.runner.gpu.used_sizes import UsedSizes, default_directory
from quire.runner.memory_plan import has_drafts, max_other_graphs
from quire.runner.model_runner import DecoderModel, ModelRunner
from quire.runner.rows import NARROW_COLUMNS, PROMPT_COLUMN, WIDE_COLUMNS, DeviceRows
from quire.runner.sampling.candidates import CandidatesOfRows, PromptScores
from quire.runner.sampling.edits import Edits
from quire.runner.sampling.extras import Extras, LogitsProcessors
from quire.runner.sampling.sampler import Sampler, Vocabulary
from quire.runner.sampling.vocabulary import vocabulary_of
from quire.runner.step_ops import StepOps
from quire.runner.torch_ops import TorchOps

Sizes = tuple[int, int, int, int]  # rows, length, cache groups, tokens of a block


def empty_rows(
    device: torch.device, max_num_rows: int, max_model_len: int, num_groups: int, block_size: int
) -> RowTensors:
    """Allocate the state of max_num_rows rows of up to max_model_len tokens, with no requests."""
    num_blocks = -(-max_model_len // block_size) + 1
    narrow_CR = torch.zeros(len(NARROW_COLUMNS), max_num_rows, dtype=torch.int32, device=device)
    narrow_CR[NARROW_COLUMNS.index("edits")] = -1
    return RowTensors(
        lazy_zeros((max_num_rows, max_model_len), torch.int32, device),
        lazy_zeros((max_num_rows,), torch.int64, device),
        lazy_zeros((num_groups, max_num_rows, num_blocks), torch.int32, device),
        narrow_CR,
        torch.zeros(len(WIDE_COLUMNS), max_num_rows, dtype=torch.int64, device=device),
        block_size=block_size,
        prompt_column=PROMPT_COLUMN,
    )


def as_tensors(rows: RowArrays) -> RowTensors:
    """Return tensors that share the memory of these rows."""
    return RowTensors(
        torch.from_numpy(rows.tokens_RM),
        torch.from_numpy(rows.computed_R),
        torch.from_numpy(rows.tables_GRL),
        torch.from_numpy(rows.narrow_CR),
        torch.from_numpy(rows.wide_CR),
        rows.block_size,
        PROMPT_COLUMN,
    )


def make_device(device: torch.device, *, forbids_waiting: bool = False) -> Device:
    """Return the queue of a torch device's work, or a device that does the work at once."""
    if device.type == "cuda":
        return CudaDevice(device, forbids_waiting=forbids_waiting)
    return HostDevice(device)


def make_ops(
    device: Device, state: RowTensors, vocab_size: int, *, native_launch: bool = False
) -> StepOps:
    """Return step operations: kernels on a GPU that has them, torch's operations elsewhere.
    native_launch: let the C++ core launch recorded steps, if the device supports it."""
    if gpu.kernels_for(state.tokens_RM, "row_deltas", any_dtype=True) is None:
        return TorchOps(device, state)
    from quire.runner.gpu.kernel_ops import KernelOps  # Triton is imported where it is used

    launches = device if native_launch and isinstance(device, CudaDevice) else None
    return KernelOps(device, state, vocab_size, launches)


def assemble(
    config: EngineConfig,
    model: DecoderModel,
    backend: AttentionBackend,
    sizes: Sizes,
    vocab_size: int,
    torch_device: torch.device,
    group: RankGroup = ALONE,
    state: RowTensors | None = None,
) -> ModelRunner:
    """Assemble a runner that launches every step directly, without recordings. group: ranks that
    share each layer. state: existing state of the rows, if any."""
    device = make_device(torch_device, forbids_waiting=config.debug_transfers)
    state = empty_rows(device.device, *sizes) if state is None else state
    ops = make_ops(device, state, vocab_size, native_launch=config.native_launch)
    vocabulary = vocabulary_of(vocab_size, group)
    sampler = make_sampler(config.logits_processors, device, state, ops, vocabulary)
    runner = ModelRunner(model, backend, DeviceRows(device, state, ops), sampler, device)
    runner.make_draft_step = VerifyStep

    def logits(hidden_PD: torch.Tensor) -> torch.Tensor:
        return vocabulary.whole(runner.model.logits(hidden_PD))

    sampler.features.append(PromptScores(runner.attachments, vocab_size, state, logits))
    return runner


def make_sampler(
    processors: Sequence[str],
    device: Device,
    state: RowTensors,
    ops: StepOps,
    vocabulary: Vocabulary,
) -> Sampler:
    """Return a sampler with all features. processors: names of logits processors."""
    num_rows = len(state.computed_R)
    edits = Edits(device, num_rows)
    extras = Extras(state, LogitsProcessors(processors))
    features = CandidatesOfRows(vocabulary.size), extras, edits
    return Sampler(ops, num_rows, vocabulary, features, edits)


def record_graphs(
    runner: ModelRunner,
    config: EngineConfig,
    identity: str,
    num_blocks: Sequence[int] = (),
    *,
    remembers: bool = True,
) -> None:
    """Make a runner record its steps, if it can and the config allows it. identity: of the model's
    shape, a key for the list of used graphs. num_blocks: of each cache group. remembers: whether
    that list is saved; ranks do not, because all ranks must record the same steps in the same
    order."""
    if config.enforce_eager or not runner.can_record:
        return
    facts = [identity, config.compilation, repr(config.deterministic), *_versions(runner)]
    used = UsedSizes(default_directory(), facts) if remembers else None
    in_pieces, max_others = config.compilation == "piecewise", max_other_graphs(config)
    runner.record(in_pieces=in_pieces, used=used, max_others=max_others)
    if config.graph_warmup:
        depth, runs = config.scheduler.pipeline_depth, device_runs(config)
        drafters = {None, runs if depth and depth > 1 else None} if has_drafts(config) else set()
        runner.warm_up(num_blocks, sorted(drafters, key=lambda each: each or ()))


def _versions(runner: ModelRunner) -> tuple[str, ...]:
    from quire.ops.kernels.launch import VERSION  # imports Triton

    device = runner.device.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, str(torch.__version__), str(torch.version.cuda), VERSION

"""Adapters of a runner's rows on a GPU: their memory, and which rows of a step use which.

    loading thread    files -> pinned memory of the host (`PackedAdapter`)
    between steps     pinned memory -> a slot, and the slots of the scheduled rows -> the device
    in a step         tokens grouped by slot, then two launches for each adapted layer

All memory is allocated once: recorded steps hold its address, and read what is there when they run.
A slot holds an adapter's matrices one after another, with its own ranks. A step groups its tokens
itself, from the slots of its rows. So a recorded step is right for any mix of adapters, and for
draft tokens whose number only the device knows. If neither slots nor rows have changed, the host
has nothing to do. If no row has an adapter, a second recording of the step's size skips all
work for adapters, and fuses layers as without them.

Shape legend: T tokens, S scheduled rows, E slots, K inputs, O outputs of a layer, N outputs of a
part, R rank of a part, C numbers of a slot's memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.plan import Plan
from quire.base.settings.config import EngineConfig
from quire.base.settings.lora import EXPERTS, LoraConfig
from quire.models.load.adapters import AdaptedModel
from quire.ops.adapters import AdapterPart, AdapterParts, LayerSize
from quire.ops.attention_inputs import AttentionStep
from quire.ops.gpu import kernels_for, load_kernels
from quire.ops.host.host_memory import to_device
from quire.runner.adapters import RowAdapters
from quire.runner.attachment import ForwardPart
from quire.spec.model_spec import ModelSpec

Int32 = npt.NDArray[np.int32]

KERNELS = "products.adapters"
MAX_DEVICE_SLOTS = 255  # one program of the sort counts the tokens of all


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter in memory of the host, as a slot holds it. values: its matrices. table: its part
    of the table, int64."""

    values: torch.Tensor
    table: torch.Tensor


def has_device_slots(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device has kernels for adapters of this dtype."""
    return kernels_for(torch.empty(0, dtype=dtype, device=device), KERNELS) is not None


class DeviceSlots:
    """Adapters in the slots of a GPU. layers: sizes by number. max_rows: of a step. is_fixed:
    whether a token's bits must not depend on the number of tokens."""

    def __init__(
        self,
        num_slots: int,
        layers: Sequence[LayerSize],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        *,
        is_fixed: bool = False,
    ) -> None:
        self._kernels: Any = load_kernels(KERNELS)
        kernels = self._kernels
        self._num_slots, self._max_rank, self._is_fixed = num_slots, max_rank, is_fixed
        max_parts = max(len(layer.outputs) for layer in layers)
        self._shape = len(layers), max_parts, kernels.FIELDS
        step = max_parts * kernels.FIELDS
        self._layers = [
            kernels.AdaptedLayer(number * step, len(layer.outputs), max_rank, layer.is_aligned)
            for number, layer in enumerate(layers)
        ]
        self._capacity = max_rank * sum(map(self._numbers_of, layers))
        self._memory_EC = torch.zeros(num_slots, self._capacity, dtype=dtype, device=device)
        self._table_EN = torch.zeros(
            num_slots, len(layers) * step, dtype=torch.int64, device=device
        )
        self._rows_S = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._groups: Any = None
        self.is_idle = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of the memory on the device."""
        return self._memory_EC.nbytes + self._table_EN.nbytes + self._rows_S.nbytes

    def prepare(self, parts: AdapterParts) -> PackedAdapter:
        """Return an adapter that `put` takes. Any thread may call this."""
        memory = self._memory_EC
        is_pinned = memory.device.type == "cuda"
        numbers = sum(self._numbers_of_part(part) for own in parts.values() for part in own)
        assert numbers <= self._capacity, "an adapter is larger than all layers with the max rank"
        values = torch.zeros(numbers, dtype=memory.dtype, pin_memory=is_pinned)
        table = torch.zeros(self._shape, dtype=torch.int64, pin_memory=is_pinned)
        at = 0
        for number, own in parts.items():
            for i, part in enumerate(own):
                table[number, i] = torch.tensor(self._entry(part, at))
                for matrix in (part.down_RK, part.up_RN):
                    (rank, width), row = matrix.shape, self._aligned(matrix.shape[1])
                    values[at : at + rank * row].view(rank, row)[:, :width] = matrix
                    at += rank * row
        return PackedAdapter(values, table.flatten())

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Copy an adapter into a slot, after all earlier work of the device."""
        memory = self._memory_EC[slot, : len(adapter.values)]
        memory.copy_(adapter.values, non_blocking=True)
        self._table_EN[slot].copy_(adapter.table, non_blocking=True)

    def set_rows(self, slots: Int32) -> None:
        """Set the slots of the scheduled rows of the next steps, -1 without an adapter."""
        assert len(slots) <= len(self._rows_S), f"{len(slots)} rows are more than max_rows"
        self._rows_S[: len(slots)].copy_(to_device(slots, self._rows_S.device))

    def group(self, starts_S1: torch.Tensor, num_tokens: int) -> None:
        """Group the tokens of the step whose forward pass follows. starts: int32 [S + 1]."""
        self.is_idle = False
        self._groups = self._kernels.group_tokens(
            self._rows_S, starts_S1, num_tokens, self._num_slots, is_fixed=self._is_fixed
        )

    def skip(self) -> None:
        """Add nothing in the forward pass that follows, since no row of the step has an adapter."""
        self.is_idle, self._groups = True, None

    def add(self, out_TO: torch.Tensor, x_TK: torch.Tensor, layer: int) -> None:
        """Add to the outputs [T, O] of the tokens that use adapters, for inputs [T, K]."""
        assert self._groups is not None, "the step's tokens are grouped first"
        places = self._memory_EC, self._table_EN, self._layers[layer]
        self._kernels.add(out_TO, x_TK, self._groups, *places)

    def _entry(self, part: AdapterPart, at: int) -> tuple[int, ...]:
        """Return a part's numbers in the table, if its matrices begin at this one."""
        rank, inputs = part.down_RK.shape
        assert rank <= self._max_rank
        up_at = at + rank * self._aligned(inputs)
        scale = int(np.float32(part.scale).view(np.int32))
        return at, up_at, rank, part.first, part.up_RN.shape[1], scale

    def _numbers_of_part(self, part: AdapterPart) -> int:
        return sum(len(each) * self._aligned(each.shape[1]) for each in (part.down_RK, part.up_RN))

    def _numbers_of(self, layer: LayerSize) -> int:
        """Return the numbers of one rank of all modules of a layer."""
        outputs = sum(map(self._aligned, layer.outputs))
        return len(layer.outputs) * self._aligned(layer.inputs) + outputs

    def _aligned(self, number: int) -> int:
        size: int = self._kernels.ALIGNED
        return -(-number // size) * size


UNKNOWN = -2  # no slot has this number
Arrived = tuple[int, PackedAdapter]  # a slot, and the adapter for it


@dataclass(frozen=True, eq=False)
class DeviceStepAdapters(ForwardPart):
    """Changes of one step. arrived: adapters to copy, in this order. rows: the slot of each
    scheduled row, -1 without an adapter; None if the device knows them. done: called when the
    device has got both. is_used: whether a row has an adapter."""

    slots: DeviceSlots
    is_used: bool = True
    arrived: Sequence[Arrived] = ()
    rows: Int32 | None = None
    done: Callable[[], None] = lambda: None

    @property
    def is_at_rest(self) -> bool:
        """Return whether slots and rows stay as they are."""
        return not self.arrived and self.rows is None

    @property
    def unused(self) -> "DeviceStepAdapters":
        """Return the part in steps without adapters."""
        return replace(self, is_used=False)

    def before(self) -> None:
        """Copy the adapters and the rows' slots to the device."""
        for slot, adapter in self.arrived:
            self.slots.put(slot, adapter)
        if self.rows is not None:
            self.slots.set_rows(self.rows)
        self.done()

    def attention(self, step: AttentionStep) -> AttentionStep:
        """Group the step's tokens by adapter, if there are any; return the step as it is."""
        if self.is_used:
            self.slots.group(step.query_starts_S1, step.positions_T.shape[-1])
        else:
            self.slots.skip()
        return step


class DeviceRowAdapters(RowAdapters):
    """Adapters of a runner's rows on a GPU. slots: of the adapted model. max_rows: of a step."""

    def __init__(
        self, adapted: AdaptedModel, config: LoraConfig, slots: DeviceSlots, max_rows: int
    ) -> None:
        super().__init__(adapted, config)
        self._device_slots = slots
        self.at_rest: DeviceStepAdapters = DeviceStepAdapters(slots)
        self.unused = self.at_rest.unused
        self._waiting: list[Arrived] = []  # adapters that the device has not got yet
        self._known = np.full(max_rows, -1, np.int32)  # slots of the last step's rows
        # Numbers of the last change that was planned, and of the last that the device has got.
        self._planned = self._done = 0

    def _put(self, slot: int, adapter: PackedAdapter) -> None:
        self._waiting.append((slot, adapter))

    def _part_of(self, plan: Plan) -> ForwardPart:
        """See RowAdapters. A change that did not reach the device comes again with the next plan.
        The device also knows which rows have no adapter, since any graph may serve them."""
        rows = np.full(len(plan.rows), -1, np.int32)
        for i, row in enumerate(plan.rows.tolist() if self._rows else ()):
            if row in self._rows:
                rows[i] = self._slot_of(self._rows[row])
        is_known = self._done == self._planned and np.array_equal(rows, self._known[: len(rows)])
        is_used = bool((rows >= 0).any())
        if is_known and not self._waiting:
            return self.at_rest if is_used else self.unused
        if self._done != self._planned:
            self._known.fill(UNKNOWN)  # an earlier change may never reach the device
        self._known[: len(rows)] = rows
        self._planned += 1
        arrived, number = tuple(self._waiting), self._planned

        def done() -> None:
            self._waiting = [each for each in self._waiting if each not in arrived]
            self._done = max(self._done, number)

        return DeviceStepAdapters(self._device_slots, is_used, arrived, rows, done)


def adapters_on_gpu(
    config: EngineConfig, spec: ModelSpec, model: Any, dtype: torch.dtype, device: torch.device
) -> DeviceRowAdapters:
    """Enable adapters on a model's layers, with memory for all slots. config: with derived values.
    Raises ConfigError for settings that a GPU cannot serve, and OutOfMemory."""
    lora, max_rows = config.lora, config.scheduler.max_num_seqs
    _check(lora, dtype, device)
    assert max_rows, "it is derived"

    def make_slots(layers: Sequence[LayerSize]) -> DeviceSlots:
        sizes = lora.max_loras, layers, lora.max_lora_rank
        try:
            return DeviceSlots(*sizes, dtype, device, max_rows, is_fixed=config.deterministic)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the memory of {lora.max_loras} adapters of rank {lora.max_lora_rank} does not fit"
                " next to the weights; lower max_loras or max_lora_rank, or set"
                " lora_target_modules."
            ) from error

    adapted = AdaptedModel(model, spec, lora, dtype, make_slots)
    return DeviceRowAdapters(adapted, lora, adapted.slots, max_rows)


def _check(lora: LoraConfig, dtype: torch.dtype, device: torch.device) -> None:
    if not has_device_slots(dtype, device):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            "enable_lora: adapters on a GPU need Triton, and a dtype of float32, float16 or"
            f" bfloat16, got {name}. Install triton, change dtype, or set device to cpu."
        )
    if lora.max_loras > MAX_DEVICE_SLOTS:
        raise ConfigError(
            f"max_loras must be at most {MAX_DEVICE_SLOTS} on a GPU, got {lora.max_loras}; lower"
            " it, or set device to cpu."
        )
    if EXPERTS in lora.lora_target_modules:
        raise ConfigError(
            f"lora_target_modules: adapters cannot change {EXPERTS!r} of a mixture on a GPU; remove"
            " it, or set device to cpu."
        )

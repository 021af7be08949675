"""Adapters of a runner's rows: load them into slots, and set which rows of a step use which.

Adapters are loaded by any thread while steps run. The caller assigns slots, and never replaces an
adapter that an unfinished request uses. Plans in flight may still have rows of finished requests.
So a loaded adapter waits for its slot until a later plan has released those rows. The most recently
used adapters stay in memory, in a slot or not.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import EngineError, ModelError
from quire.base.plan import Plan
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.adapter_sets import digest_of
from quire.models.load.adapters import AdaptedModel
from quire.ops.adapters import AdapterSlots, Group
from quire.runner.attachment import ForwardPart


@dataclass(frozen=True)
class StepAdapters(ForwardPart):
    """The rows of one step that use adapters, as indices of the step's tokens by slot."""

    slots: AdapterSlots
    groups: Sequence[Group] = ()

    @property
    def can_be_recorded(self) -> bool:
        """Return whether no row uses an adapter."""
        return not self.groups

    def before(self) -> None:
        """Set the groups for the step's forward pass."""
        self.slots.begin_step(self.groups)


class RowAdapters:
    """Adapters of a runner's rows, an `Attachment` of its forward pass."""

    def __init__(self, adapted: AdaptedModel, config: LoraConfig) -> None:
        self._adapted = adapted
        self._max_rank, self._num_held = config.max_lora_rank, config.num_held
        # Adapters in memory by id, least recently used first.
        self._held: OrderedDict[str, Any] = OrderedDict()
        self._loading = threading.Lock()
        self._arrived: deque[tuple[int, str, Any]] = deque()  # in no slot yet
        self._slots: list[str] = [""] * config.max_loras  # ids
        self._numbers: dict[str, int] = {}  # slots by id
        self._rows: dict[int, str] = {}  # ids of rows that use an adapter
        self.at_rest: ForwardPart = StepAdapters(adapted.slots)

    def load(self, slot: int, adapter_id: str, path: str) -> None:
        """Load an adapter from its files, unless it is in memory, and assign it to a slot. Any
        thread may call this. Raises ModelError if its files are unsuitable or have changed."""
        with self._loading:
            parts = self._held.get(adapter_id)
            if parts is None:
                if digest_of(path) != adapter_id:
                    raise ModelError(
                        "the files of this adapter have changed since it was added; add it again."
                    )
                parts = self._adapted.load(path, self._max_rank)
            self._held[adapter_id] = parts
            self._held.move_to_end(adapter_id)
            self._arrived.append((slot, adapter_id, parts))
            coming = {slot: each for slot, each, _ in list(self._arrived)}
            used = {*self._slots, *coming.values()}
            unused = [each for each in self._held if each not in used]
            for each in unused[: max(0, len(self._held) - self._num_held)]:
                del self._held[each]

    def prepare(self, plan: Plan) -> ForwardPart:
        """Note which rows a plan starts, forks and releases; return the adapters of its step."""
        rows = self._rows
        for row in plan.released.tolist() if rows else ():
            rows.pop(row, None)
        for start in plan.started:
            rows.pop(start.row, None)
            if start.adapter_id:
                rows[start.row] = start.adapter_id
        for fork in plan.forked if rows else ():
            rows.pop(fork.child, None)
            if fork.parent in rows:
                rows[fork.child] = rows[fork.parent]
        self._fill_slots()
        return self._part_of(plan)

    def _part_of(self, plan: Plan) -> ForwardPart:
        """Return the adapters of a plan's step, when its rows and slots have been noted."""
        groups = self._groups(plan) if self._rows else ()
        return StepAdapters(self._adapted.slots, groups) if groups else self.at_rest

    def _put(self, slot: int, adapter: Any) -> None:
        """Put a loaded adapter into a slot for this plan's step and later ones."""
        self._adapted.slots.put(slot, adapter)

    def _fill_slots(self) -> None:
        """Put loaded adapters into their slots, in the order of loading. Stop at a slot whose
        adapter rows still use, once all rows have their adapters."""
        used = set(self._rows.values())
        while self._arrived:
            slot, adapter_id, parts = self._arrived[0]
            if self._slots[slot] in used and used.issubset(self._slots):
                return
            self._arrived.popleft()
            self._slots[slot] = adapter_id
            self._numbers = {each: number for number, each in enumerate(self._slots)}
            self._put(slot, parts)

    def _groups(self, plan: Plan) -> list[Group]:
        """Return the step's tokens that use adapters, by slot."""
        found: dict[str, list[int]] = {}
        begin = 0
        for row, num in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if row in self._rows:
                found.setdefault(self._rows[row], []).extend(range(begin, begin + num))
            begin += num
        return [(self._slot_of(adapter_id), tokens) for adapter_id, tokens in found.items()]

    def _slot_of(self, adapter_id: str) -> int:
        if adapter_id not in self._numbers:
            raise EngineError(f"the adapter {adapter_id} is in no slot")
        return self._numbers[adapter_id]

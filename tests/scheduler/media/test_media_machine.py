"""The scheduler's state machine with images in prompts, a small encoder cache, and a device with
slots.

The device checks that each token of an item is read exactly when it is computed. It checks that the
slot holds the item's output then, and that no block holds tokens of another image.
"""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from quire.base.messages import Request
from quire.base.plan import Plan
from quire.base.requests.media_items import MediaItem
from quire.base.settings.config import SchedulerConfig
from tests.scheduler.test_scheduler_machine import FULL, STATES, WINDOW, SchedulerMachine
from tests.support.scheduler.fake_device import FakeDevice, FakeExecutor
from tests.support.scheduler.fake_stores import content
from tests.support.scheduler.state_machines import run_machine

NUM_SLOTS = 7
PIXELS = b"pixels of a picture"


class MediaDevice(FakeDevice):
    """Notes the item and the token of it that each slot holds."""

    def __init__(self, *sizes):  # type: ignore[no-untyped-def]
        super().__init__(*sizes)
        self.encoded: list[tuple[bytes, int] | None] = [None] * NUM_SLOTS
        self.media: dict[int, tuple[MediaItem, ...]] = {}
        self.num_inputs = self.num_reads = 0

    def _apply(self, plan: Plan) -> None:
        super()._apply(plan)
        for start in plan.started:
            assert not any(item.pixels for item in start.media), "a row needs only the spans"
            self.media[start.row] = start.media
        for fork in plan.forked:
            self.media[fork.child] = self.media[fork.parent]
        written: list[int] = []
        for each in plan.encoder_inputs:
            assert each.item.pixels and len(each.slots) == each.item.num_tokens
            for i, slot in enumerate(each.slots.tolist()):
                self.encoded[slot] = each.item.digest, i
                written.append(slot)
        assert len(set(written)) == len(written), "two items in one slot"
        self.num_inputs += len(plan.encoder_inputs)
        self._check_reads(plan)

    def _check_reads(self, plan: Plan) -> None:
        found: dict[tuple[int, int], tuple[bytes, int] | None] = {}
        for read in plan.encoder_reads:
            for position, slot in enumerate(read.slots.tolist(), read.position):
                assert (read.row, position) not in found, "a token is read twice"
                found[read.row, position] = self.encoded[slot]
        expected = {}
        for row, count in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            first, last = self.computed[row], self.computed[row] + count
            for item in self.media[row]:
                span = range(max(first, item.start), min(last, item.end))
                expected |= {(row, at): (item.digest, at - item.start) for at in span}
                is_cut = item.start < last < item.end
                assert not (item.is_whole and is_cut), "a whole item is cut"
        assert found == expected
        self.num_reads += len(found)

    def _content(self, row: int, position: int) -> int:
        tokens = np.asarray(self.tokens[row][: position + 1], np.int32)
        return content(tokens, [(item.start, item.digest) for item in self.media[row]])


class MediaMachine(SchedulerMachine):
    """A third of the items are equal to others."""

    takes_media = True

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        limit = (config.max_num_batched_tokens or 0) % 6  # 0 is as many as the step has
        return replace(config, max_encoder_tokens=limit, encoder_cache_tokens=NUM_SLOTS)

    def make_executor(self, sizes, lazy):  # type: ignore[no-untyped-def]
        self.device = MediaDevice(*sizes)
        return FakeExecutor(self.device, lazy)

    def prepared(self, request: Request) -> Request:
        config = self.scheduler.media
        assert config is not None
        random = np.random.default_rng(request.seed)
        items, end, num = list[MediaItem](), 0, len(request.prompt_token_ids)
        while random.integers(5):
            start, size = end + int(random.integers(0, 4)), int(random.integers(1, NUM_SLOTS + 1))
            if start + size > num:
                break
            is_whole = bool(random.integers(2)) and size <= config._max_whole
            digest = b"%d %d" % (size, random.integers(3)) + bytes([is_whole]) * 28
            items.append(MediaItem(start, size, digest[:32], pixels=PIXELS, is_whole=is_whole))
            end = start + size
        return msgspec.structs.replace(request, media=tuple(items))


class MediaWindowMachine(MediaMachine):
    groups = (FULL, WINDOW)


class MediaStatesMachine(MediaMachine):
    groups = (FULL, STATES)


@pytest.mark.parametrize("max_examples", [4, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", [MediaMachine, MediaWindowMachine, MediaStatesMachine])
def test_items_change_no_tokens(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)

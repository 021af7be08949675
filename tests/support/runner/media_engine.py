"""Media without a vision model: a text model with a tower that looks numbers up. Plans have encoder
inputs and reads. A scheduler and a runner handle pictures in prompts."""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from quire.base.messages import Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.media_items import EncoderInput, EncoderRead, MediaItem
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.engine.start.build import make_scheduler
from quire.models import registry
from quire.models.checkpoint.source import ModelSource, resolve_model
from quire.models.families.llama import Llama
from quire.models.parts.layers import ParamFactory
from quire.models.vision.positions import mrope_positions
from quire.models.vision.tower import VisionTower
from quire.ops.attention.traced import TracedAttention
from quire.ops.trace.program import Untraceable
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from quire.scheduler.scheduler import Scheduler
from quire.spec.model_spec import ModelSpec
from tests.support.models.reference_checkpoints import checkpoint

MERGE = 2
PLACEHOLDER = 3  # a token id


def make_item(seed: int, start: int, rows: int, columns: int, width: int) -> MediaItem:
    """An image of rows x columns tokens whose tower outputs have this width."""
    random, num = np.random.default_rng(seed), rows * columns
    pixels = random.integers(0, 256, (num, width), np.uint8)
    table = random.normal(size=(3, 256)).astype(np.float32)
    return MediaItem(
        start=start,
        num_tokens=num,
        digest=hashlib.sha256(pixels.tobytes()).digest(),
        grid=(1, MERGE * rows, MERGE * columns),
        shape=pixels.shape,
        pixels=pixels.tobytes(),
        table=table.tobytes(),
    )


class FakeTower(VisionTower):
    """Returns for each pixel its entry in the table. broken: raises for items of so many tokens."""

    prefixes = ("tower.",)
    broken = num_encoded = 0
    numbers_per_token = 5

    def encode(self, image: Any) -> torch.Tensor:
        self.num_encoded += 1
        if len(image.pixels) == self.broken:
            raise ValueError("a fault in the tower")
        return torch.from_numpy(image.table[0][image.pixels])


class VisionLlama(Llama):
    """A text model with a fake tower. calls: the ids and positions of all forward passes."""

    only_operations = False

    def __init__(self, spec: ModelSpec, factory: ParamFactory, position_axes: int = 3) -> None:
        super().__init__(spec, factory)
        self.position_axes = position_axes
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.vision = FakeTower(spec.hidden_size, factory)

    def take_encoder_memory(self, num_slots: int) -> torch.Tensor:
        # What no item was encoded into must not be read.
        return super().take_encoder_memory(num_slots).fill_(torch.nan)

    def forward(
        self, input_ids_T: Any, positions_T: Any, attention: Any, *args: Any, **given: Any
    ) -> torch.Tensor:
        if isinstance(attention, TracedAttention):
            raise Untraceable("a fake tower")
        self.calls.append((input_ids_T, positions_T))
        axes = (self.position_axes,) if self.position_axes > 1 else ()
        assert positions_T.shape == (*axes, len(input_ids_T)) and positions_T.dtype == torch.int64
        positions_T = mixed(positions_T) if axes else positions_T
        return super().forward(input_ids_T, positions_T, attention, *args, **given)


@contextmanager
def vision_models(position_axes: int = 3) -> Iterator[None]:
    """Let models of the type llama have a fake tower."""
    make = partial(VisionLlama, position_axes=position_axes)
    with mock.patch.dict(registry.MODELS, {"llama": make}):
        yield


class WholeModel:
    """A text model for one sequence with items as a whole, without slots, by the definition."""

    def __init__(self, model: Any, items: list[MediaItem], num_tokens: int, num_axes: int) -> None:
        self.model, self._items = model, items
        self._positions = torch.arange(num_tokens)
        if num_axes > 1:
            images = [(item.start, item.grid) for item in items]
            found, _ = mrope_positions(num_tokens, images, MERGE)
            self._positions = mixed(torch.from_numpy(found))

    def __call__(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attention: Any) -> Any:
        embeds_TD = self.model.embedding(ids_T)
        for item in self._items:
            pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.shape)
            table = np.frombuffer(item.table, np.float32).reshape(3, 256)
            embeds_TD[item.start : item.end] = torch.from_numpy(table[0][pixels])
        return self.model(ids_T, self._positions, attention, inputs_embeds_TD=embeds_TD)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_RD)


def mixed(positions_3T: torch.Tensor) -> torch.Tensor:
    """Positions that differ if any axis does."""
    return positions_3T[0] + 7 * positions_3T[1] + 49 * positions_3T[2]


class EncoderPlans:
    """Adds encoder inputs and reads to a scheduler's plans. Each picture keeps its slots."""

    def __init__(self, scheduler: Scheduler, items: dict[str, list[MediaItem]]) -> None:
        self._scheduler, self._items = scheduler, items
        self._slots: dict[bytes, np.ndarray] = {}
        self._num_slots = 0
        self.num_cut = 0  # reads of a part of an item

    def of(self, plan: Plan) -> Plan:
        """Return the plan with what its rows' items need."""
        inputs: list[EncoderInput] = []
        reads: list[EncoderRead] = []
        for row, num, first in zip(
            plan.rows.tolist(), plan.num_tokens.tolist(), plan.computed_bound.tolist(), strict=True
        ):
            for item in self._of_row(row):
                begin, end = max(first, item.start), min(first + num, item.end)
                if begin >= end:
                    continue
                self.num_cut += end - begin < item.num_tokens
                if item.digest not in self._slots:
                    inputs.append(EncoderInput(item, self._new_slots(item)))
                slots = self._slots[item.digest][begin - item.start : end - item.start]
                reads.append(EncoderRead(row, begin, slots))
        started = tuple(
            dataclasses.replace(
                start, media=tuple(item.without_pixels for item in self._of_row(start.row))
            )
            for start in plan.started
        )
        return plan.replace(
            started=started, encoder_inputs=tuple(inputs), encoder_reads=tuple(reads)
        )

    def _of_row(self, row: int) -> list[MediaItem]:
        sequence = self._scheduler.rows.table.sequences[row]
        return self._items.get(sequence.request.request_id, [])

    def _new_slots(self, item: MediaItem) -> np.ndarray:
        first, self._num_slots = self._num_slots, self._num_slots + item.num_tokens
        found = np.arange(first, self._num_slots, dtype=np.int32)[::-1].copy()
        self._slots[item.digest] = found
        return found


WIDTH, SLOTS, NUM_TOKENS = 32, 64, 9
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "device": "cpu", "max_num_seqs": 6, "max_num_batched_tokens": 10,
    "block_size": 4, "kv_cache_memory_bytes": 1 << 20, "max_model_len": 64,
    "attention_backend": "torch", "enable_prefix_caching": False,
    "encoder_cache_tokens": SLOTS,
}  # fmt: skip
FIRST, SECOND, OTHER = (
    make_item(1, 3, 2, 3, WIDTH), make_item(2, 12, 3, 4, WIDTH), make_item(3, 1, 4, 1, WIDTH)
)  # fmt: skip
ITEMS: dict[str, list[MediaItem]] = {
    "two": [FIRST, SECOND],
    "text": [],
    "one": [OTHER],
    "same": [FIRST],
}
Found = dict[tuple[str, int], list[tuple[int, bytes]]]


class Engine:
    """A scheduler and a runner with a fake tower, for which plans are completed here. folder: of
    another model, with a tower that the scheduler knows of; items: of its requests."""

    def __init__(
        self,
        num_axes: int = 3,
        broken: int = 0,
        folder: Path | None = None,
        items: dict[str, list[MediaItem]] = ITEMS,
        **settings: Any,
    ) -> None:
        path = str(folder or checkpoint("llama"))
        config = config_from_flat(model=path, **SETTINGS | settings)
        with vision_models(num_axes):
            self.built = self.build(config, resolve_model(path, None))
        self.runner = self.built.runner
        self.model: Any = self.runner.model
        if broken:
            self.model.vision.broken = broken
        self.scheduler: Scheduler = make_scheduler(self.built, resolve_model(path, None))
        self.plans = EncoderPlans(self.scheduler, items)
        self.items = {} if self.scheduler.media is None else items  # which the scheduler plans
        self.errors: dict[str, str] = {}

    def build(self, config: EngineConfig, source: ModelSource) -> BuiltRunner:
        """Make the runner that answers."""
        return build_runner(config, source)

    def add(self, name: str, **params: Any) -> None:
        """Add a request of `ITEMS`."""
        self.add_prompt(name, self.prompt_of(name), **params)

    def add_prompt(self, name: str, prompt: list[int], **params: Any) -> None:
        """Add a request with this prompt and the items of this name."""
        common = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3}
        sampling = SamplingParams(**common | params)
        media = tuple(self.items.get(name, ()))
        self.scheduler.add(Request(name, prompt, sampling, seed=1, media=media), 0.0)

    def drive(self, depth: int = 1, before: Any = None) -> Found:
        """Run to the end: tokens and the bits of their candidates. before: called before plans."""
        found, in_flight = Found(), deque[Any]()
        while self.scheduler.has_work:
            while len(in_flight) < depth:
                if before is not None:
                    before()
                plan = self.scheduler.schedule(0.0).plan
                if plan is None:
                    break
                plan = plan if self.items else self.plans.of(plan)
                sequences = self.scheduler.rows.table.sequences
                owners = [sequences[row] for row in plan.sample_rows.tolist()]
                in_flight.append((owners, plan, self.launch(plan)))
            owners, plan, launched = in_flight.popleft()
            result: StepResult = launched.end()
            for i, (owner, row) in enumerate(zip(owners, plan.sample_rows.tolist(), strict=True)):
                name = owner.request.request_id
                if row in result.row_errors:
                    self.errors[name] = result.row_errors[row]
                    continue
                tokens = result.token_ids[i, : result.num_accepted[i]].tolist()
                each = [result.candidates[row], *result.more_candidates.get(row, [])]
                pairs = zip(tokens, (one.logprobs.tobytes() for one in each), strict=True)
                found.setdefault((name, owner.index), []).extend(pairs)
            for row, error in result.row_errors.items():
                if (owner := self.scheduler.rows.table.sequences[row]) is not None:
                    self.errors.setdefault(owner.request.request_id, error)
            self.scheduler.update(result, 0.0)
        return found

    def launch(self, plan: Plan) -> Any:
        """Begin to carry a plan out; what is returned has its result."""
        return self.runner.launch(plan)

    def prompt_of(self, name: str) -> list[int]:
        """Return the prompt of a request of `ITEMS`."""
        prompt = [(13 * i + 5 * len(name)) % 90 + 5 for i in range(29)]
        for item in ITEMS[name]:
            prompt[item.start : item.end] = [PLACEHOLDER] * item.num_tokens
        return prompt

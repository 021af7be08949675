"""A scheduler and a runner on a tiny text model, with a fake tower, and requests with pictures."""

from collections import deque
from typing import Any

from quire.base.config import EngineConfig, config_from_flat
from quire.base.media.item import MediaItem
from quire.base.messages import Request
from quire.base.plan import Plan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.engine.start.build import make_scheduler
from quire.models.source import ModelSource, resolve_model
from quire.runner.build import BuiltRunner, build_runner
from quire.scheduler.scheduler import Scheduler
from tests.runner.media.fake_media import (
    PLACEHOLDER,
    EncoderPlans,
    make_item,
    vision_models,
)
from tests.support.models.reference_checkpoints import checkpoint

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
    """A scheduler and a runner with a fake tower."""

    def __init__(self, num_axes: int = 3, broken: int = 0, **settings: Any) -> None:
        path = str(checkpoint("llama"))
        config = config_from_flat(model=path, **SETTINGS | settings)
        with vision_models(num_axes):
            self.built = self.build(config, resolve_model(path, None))
        self.runner = self.built.runner
        self.model: Any = self.runner.model
        if broken:
            self.model.vision.broken = broken
        self.scheduler: Scheduler = make_scheduler(self.built, resolve_model(path, None))
        self.plans = EncoderPlans(self.scheduler, ITEMS)
        self.errors: dict[str, str] = {}

    def build(self, config: EngineConfig, source: ModelSource) -> BuiltRunner:
        """Make the runner that answers."""
        return build_runner(config, source)

    def add(self, name: str, **params: Any) -> None:
        """Add a request of `ITEMS`."""
        common = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3}
        sampling = SamplingParams(**common | params)
        self.scheduler.add(Request(name, self.prompt_of(name), sampling, seed=1), 0.0)

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
                plan, sequences = self.plans.of(plan), self.scheduler.rows.table.sequences
                owners = [sequences[row] for row in plan.sample_rows.tolist()]
                in_flight.append((owners, plan, self.launch(plan)))
            owners, plan, launched = in_flight.popleft()
            result: StepResult = launched.result()
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

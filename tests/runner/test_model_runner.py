"""A runner on a CPU whose plans have masked rows. It waits for masks between logits and sampling.
Rows without a mask have the same bits in that batch."""

import threading
from collections import deque
from collections.abc import Iterator, Set
from typing import Any

import pytest

from quire.base.masks import MaskPromise
from quire.base.messages import Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.engine.loop.recovery import combine, restrict
from quire.engine.start.build import make_scheduler
from quire.models.checkpoint.source import resolve_model
from quire.ops.host import native
from quire.runner.build import build_runner
from quire.runner.setup.built import BuiltRunner
from quire.scheduler.scheduler import Scheduler
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.runner.row_masks import allowed, with_masks

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_num_seqs": 6, "max_num_batched_tokens": 16,
    "block_size": 4, "kv_cache_memory_bytes": 1 << 19, "max_model_len": 40,
}  # fmt: skip
MASKED = {"m0", "m1", "m2"}
Found = dict[str, list[tuple[int, bytes]]]


def build(backend: str, depth: int) -> BuiltRunner:
    path = str(checkpoint("llama"))
    config = config_from_flat(
        model=path, attention_backend=backend, pipeline_depth=depth, **SETTINGS
    )
    return build_runner(config, resolve_model(path, None))


def scheduler_of(built: BuiltRunner, names: Set[str] = frozenset()) -> Scheduler:
    """Return a scheduler with requests: three that some tests mask, and three plain ones."""
    scheduler = make_scheduler(built, resolve_model(str(checkpoint("llama")), None))
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"presence_penalty": 1.0}]
    for kind in "mp":
        for i, more in enumerate(kinds):
            params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=4, **more)
            prompt = [(13 * i + 5 * j) % 97 for j in range(4 + 7 * i)]
            if not names or f"{kind}{i}" in names:
                scheduler.add(Request(f"{kind}{i}", prompt, params, seed=i), 0.0)
    return scheduler


def drive(built: BuiltRunner, depth: int, masked: Set[str], names: Set[str] = frozenset()) -> Found:
    """Return the tokens and the bits of their candidates."""
    scheduler, in_flight, found = scheduler_of(built, names), deque[Any](), Found()
    vocab_size = built.runner.sampler.vocab_size
    while scheduler.has_work:
        while len(in_flight) < depth and (plan := scheduler.schedule(0.0).plan) is not None:
            plan, promise = with_masks(scheduler, plan, masked, vocab_size)
            owners = [scheduler.rows.table.sequences[row] for row in plan.sample_rows.tolist()]
            in_flight.append((owners, plan, built.runner.launch(plan, promise)))
        owners, plan, launched = in_flight.popleft()
        result = launched.end()
        assert not result.row_errors
        for owner, row, token in zip(
            owners, plan.sample_rows.tolist(), result.token_ids[:, 0].tolist(), strict=True
        ):
            bits = result.candidates[row].logprobs.tobytes()
            found.setdefault(owner.request.request_id, []).append((token, bits))
        scheduler.update(result, 0.0)
    return found


@pytest.fixture(params=["core", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The C++ core, or torch's operations alone."""
    if request.param == "core" and native.core() is None:
        pytest.skip("the C++ core was not built")
    if request.param == "torch":
        monkeypatch.setattr(native, "core_for", lambda *tensors: None)
    yield "auto" if request.param == "core" else "torch"


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_without_masks_have_the_same_bits_next_to_masked_rows(
    backend: str, depth: int
) -> None:
    built = build(backend, depth)
    plain = drive(built, depth, frozenset())
    found = drive(built, depth, MASKED)
    vocab_size = built.runner.sampler.vocab_size
    for name, tokens in found.items():
        if name not in MASKED:
            assert tokens == plain[name]
            continue
        assert tokens != plain[name] and len(tokens) == 9
        first = 4 + 7 * int(name[1])
        for i, (token, _) in enumerate(tokens):
            assert allowed(name, 0, first + i, vocab_size)[token]
    if backend == "auto":  # the core's bits do not depend on the batch
        alone = drive(built, depth, frozenset(), {"p0", "p1", "p2"})
        assert alone == {name: found[name] for name in alone}


def test_runner_waits_for_masks_between_logits_and_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = build("auto", 1)
    scheduler = scheduler_of(built, {"m0"})
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    plan, full_promise = with_masks(scheduler, plan, MASKED, built.runner.sampler.vocab_size)
    assert full_promise is not None
    expected = built.runner.run(plan, full_promise)
    promise, has_logits = MaskPromise(), threading.Event()
    logits = built.runner.model.logits
    monkeypatch.setattr(
        built.runner.model, "logits", lambda hidden: has_logits.set() or logits(hidden)
    )
    results: list[StepResult] = []
    thread = threading.Thread(target=lambda: results.append(built.runner.run(plan, promise)))
    thread.start()
    assert has_logits.wait(10)
    thread.join(0.1)
    assert thread.is_alive() and not results
    promise.put(full_promise.wait())
    thread.join(10)
    assert results[0].token_ids.tolist() == expected.token_ids.tolist()
    assert results[0].duration_s > 0


def before_a_mixed_plan() -> tuple[BuiltRunner, Plan, MaskPromise]:
    """Return a runner that has run all plans before the first one with masked and plain rows."""
    built = build("auto", 1)
    scheduler = scheduler_of(built)
    while True:
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        plan, promise = with_masks(scheduler, plan, MASKED, built.runner.sampler.vocab_size)
        if 1 < len(plan.masked_rows) < len(plan.sample_rows):
            assert promise is not None
            return built, plan, promise
        scheduler.update(built.runner.run(plan, promise), 0.0)


def test_parts_of_a_plan_share_its_mask_promise() -> None:
    built, plan, promise = before_a_mixed_plan()
    whole = built.runner.run(plan, promise)
    built, plan, promise = before_a_mixed_plan()
    parts = []
    for i, rows in enumerate((plan.rows[:1], plan.rows[1:3], plan.rows[3:])):
        part = restrict(plan, rows)
        if i == 1:  # also if the part has the masked_rows of the whole plan
            part = part.replace(masked_rows=plan.masked_rows)
        parts.append((part, built.runner.run(part, promise)))
    combined = combine(plan, parts)
    assert combined.token_ids.tolist() == whole.token_ids.tolist()
    assert combined.candidates.keys() == whole.candidates.keys()
    for row, each in whole.candidates.items():
        assert combined.candidates[row].logprobs.tobytes() == each.logprobs.tobytes()

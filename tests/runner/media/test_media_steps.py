"""Rows with media: a model's inputs are the same in a batch and for the whole sequence alone.

Every answer's log-probabilities are compared with one pass over prompt and answer, in which the
tower's outputs replace the embeddings.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.messages import Draft, Drafted
from quire.base.plan import Plan, StepResult
from quire.engine.loop.recovery import bisect_step
from quire.models.load.loading import load_model
from quire.ops.sampling.device_drafts import Runs
from quire.ops.sampling.find_runs import SEARCHED
from quire.runner.drafting.draft_steps import VerifyStep
from quire.spec.model_spec import load_spec
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.runner.media_engine import ITEMS, NUM_TOKENS, SECOND, Engine, Found, WholeModel


@cache
def text_model() -> Any:
    folder = checkpoint("llama")
    return load_model(folder, load_spec(folder), torch.float64, CPU)


def check(engine: Engine, found: Found, num_axes: int = 3, is_greedy: bool = True) -> None:
    """Assert that tokens and log-probabilities equal those of one pass over prompt and answer."""
    for (name, _), pairs in found.items():
        prompt, tokens = engine.prompt_of(name), [token for token, _ in pairs]
        sequence = [*prompt, *tokens[:-1]]
        whole = WholeModel(text_model(), ITEMS[name], len(sequence), num_axes)
        with torch.inference_mode():
            [logits_TV] = run_paged(
                whole,
                load_spec(checkpoint("llama")),
                [sequence],
                [[len(sequence)]],
                dtype=torch.float64,
            )
        logprobs_TV = logits_TV.double().log_softmax(1)[len(prompt) - 1 :]
        assert len(tokens) == NUM_TOKENS
        for row, (token, bits) in zip(logprobs_TV, pairs, strict=True):
            assert int(row.argmax()) == token or not is_greedy
            expected = [row[token], *np.sort(row.numpy())[::-1][:3]]
            np.testing.assert_allclose(np.frombuffer(bits, np.float32), expected, rtol=1e-5)


@pytest.mark.parametrize("num_axes", [1, 3])
def test_chunks_may_split_items(num_axes: int) -> None:
    engine = Engine(num_axes)
    for name in ITEMS:
        engine.add(name)
    found = engine.drive()
    check(engine, found, num_axes)
    assert {name for name, _ in found} == set(ITEMS)
    assert engine.plans.num_cut >= 2 and engine.model.vision.num_encoded == 3, (
        "two requests share an image"
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_inherit_the_items_of_their_prompt(depth: int) -> None:
    engine = Engine(pipeline_depth=depth)
    engine.add("one", n=3, temperature=2.0)
    engine.add("two", n=2, temperature=2.0)
    found = engine.drive(depth)
    assert len({tuple(token for token, _ in pairs) for pairs in found.values()}) == 5
    check(engine, found, is_greedy=False)


def test_reused_rows_have_other_items() -> None:
    engine = Engine(max_num_seqs=1)
    for name in ("two", "text", "one", "text", "same"):
        engine.add(name)
        check(engine, engine.drive())


def test_preempted_rows_recompute_items_and_answers() -> None:
    engine = Engine(kv_cache_memory_bytes=24 * 2 * 2 * 2 * 4 * 8 * 8, max_num_batched_tokens=40)
    for name in ITEMS:
        engine.add(name)
    starts: list[int] = []
    launch = engine.launch

    def noting(plan: Plan) -> Any:
        starts.extend(len(start.token_ids) for start in plan.started)
        return launch(plan)

    engine.launch = noting  # type: ignore[method-assign]
    check(engine, engine.drive())
    assert max(starts) > 29, "an answer was recomputed"


@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_do_not_change_answers_with_media(on_device: bool) -> None:
    plain = Engine()
    for name in ITEMS:
        plain.add(name)
    answers = {name: [t for t, _ in pairs] for (name, _), pairs in plain.drive().items()}
    engine = Engine()
    engine.runner.make_draft_step = partial(VerifyStep, runs=Runs(1, 3, SEARCHED))
    for name in ITEMS:
        engine.add(name)

    def draft() -> None:
        drafts = []
        for sequence in engine.scheduler.rows.table.sequences:
            if sequence is not None and sequence.num_output_tokens:
                name, at = sequence.request.request_id, sequence.num_output_tokens
                right = answers[name][at : at + 2]
                drafts.append(Draft(name, 0, sequence.num_known_tokens, [*right, 7]))
        if drafts:
            engine.scheduler.control(Drafted(drafts, on_device=on_device), 0.0)

    found = engine.drive(before=draft)
    check(engine, found)
    assert {name: [t for t, _ in pairs] for (name, _), pairs in found.items()} == answers
    has_drafts = [len(ids) > 10 or len(positions[0]) > 4 for ids, positions in engine.model.calls]
    assert any(has_drafts)


class BisectingExecutor:
    """Executes plans by an engine's runner, and bisects plans that fail."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.num_failed = engine, 0

    def submit(self, plan: Plan, masks: Any = None) -> None:
        try:
            self._result = self._engine.runner.run(plan)
        except Exception as error:
            self.num_failed += 1
            nothing = np.empty(0, np.int32)
            self._result = StepResult(plan.step_id, nothing, nothing, error=str(error))

    def next_result(self) -> StepResult:
        return self._result

    def launch(self, plan: Plan) -> "BisectingExecutor":
        self.submit(plan)
        executor: Any = self
        if self._result.error is not None:
            self._result = bisect_step(executor, plan)
        return self

    def end(self) -> StepResult:
        return self._result


def test_item_that_fails_to_encode_fails_only_its_requests() -> None:
    engine = Engine(broken=SECOND.num_tokens, max_num_batched_tokens=40)
    engine.launch = BisectingExecutor(engine).launch  # type: ignore[method-assign]
    for name in ITEMS:
        engine.add(name)
    found = engine.drive()
    assert engine.errors.keys() == {"two"}
    assert "a fault in the tower" in engine.errors["two"]
    check(engine, {key: pairs for key, pairs in found.items() if key[0] != "two"})
    assert {name for name, _ in found} == set(ITEMS) - {"two"}


def test_steps_that_fail_after_encoding_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    parts, hidden, failed_items = BisectingExecutor(engine), engine.runner.hidden, set[int]()
    engine.launch = parts.launch  # type: ignore[method-assign]

    def fails_once(inputs: Any, shape: Any, backend: Any, parts: Any) -> torch.Tensor:
        [media] = parts
        if media.items and id(media.items[0]) not in failed_items:
            failed_items.add(id(media.items[0]))
            raise RuntimeError("a fault by chance")
        return hidden(inputs, shape, backend, parts)

    monkeypatch.setattr(engine.runner, "hidden", fails_once)
    for name in ITEMS:
        engine.add(name)
    check(engine, engine.drive())
    assert not engine.errors and parts.num_failed == len(failed_items) > 1
    assert engine.model.vision.num_encoded > 3, "items were encoded again"


def test_bits_do_not_depend_on_the_batch() -> None:
    together = Engine(dtype="float32", attention_backend="auto")
    for name in ITEMS:
        together.add(name)
    found = together.drive()
    for name in ITEMS:
        alone = Engine(dtype="float32", attention_backend="auto", max_num_batched_tokens=64)
        alone.add(name)
        assert alone.drive() == {(name, 0): found[name, 0]}


def test_prompt_logprobs_score_the_tokens_of_the_prompt() -> None:
    engine = Engine()
    engine.add("one", prompt_logprobs=0)
    engine.add("two", prompt_logprobs=0)
    scores: dict[str, list[int]] = {}
    launch = engine.launch

    def noting(plan: Plan) -> Any:
        launched = launch(plan)
        for row, each in launched.end().prompt_candidates.items():
            name = engine.scheduler.rows.table.sequences[row].request.request_id
            scores.setdefault(name, []).extend(int(one.token_ids[0]) for one in each)
        return launched

    engine.launch = noting  # type: ignore[method-assign]
    engine.drive()
    for name in ("one", "two"):
        assert scores[name] == engine.prompt_of(name)[1:]

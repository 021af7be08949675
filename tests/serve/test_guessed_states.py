"""Draft tokens for models with states, in the whole engine. An engine without drafts gives the same
bits, also with chunked prompts, prefix hits, forks and preemption."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.drafting.draft_pace import StepTimes
from quire.ops.attention.states import RecordedInputs
from quire.ops.host.native import core
from quire.runner.drafting.draft_steps import VerifyStep
from quire.runner.memory_plan import retained_inputs_bytes
from tests.runner.test_guesses import Oracle
from tests.serve.test_exactness import assert_idle
from tests.serve.test_hybrid import FEW_BLOCKS, P, ask, folder, open_llm
from tests.support.cases import in_turn, slow_but
from tests.support.engine.attachments import draft_with
from tests.support.models.checkpoints import random_tokens, write_checkpoint
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core is not built")

PLAIN = SamplingParams(temperature=0.8, seed=1, max_tokens=23, ignore_eos=True, logprobs=2)
SEVERAL = SamplingParams(
    n=3, temperature=0.9, seed=5, max_tokens=17, ignore_eos=True, repetition_penalty=1.3, logprobs=0
)
DRAFTERS = [(1, 1.0), (4, 1.0), (3, 0.0), (4, 0.7), (9, 0.9)]
FEW: dict[str, Any] = {"kv_cache_memory_bytes": pool_bytes(folder(), FEW_BLOCKS, P, 4)}


def bits(outputs: list[RequestOutput]) -> list[Any]:
    """Return the tokens, finish reasons and log-probabilities of all answers."""
    return [(c.token_ids, c.finish_reason, c.logprobs) for o in outputs for c in o.outputs]


def draft_from(llm: LLM, outputs: list[RequestOutput], num: int, right: float) -> Oracle:
    """Let an engine draft from its known answers."""
    known = {
        (tuple(o.prompt_token_ids or ()), c.index): list(c.token_ids)
        for o in outputs
        for c in o.outputs
    }
    oracle = Oracle(known, num, right)
    draft_with(llm.engine.client.core, oracle)
    return oracle


@pytest.mark.parametrize("dtype", slow_but(("float32", "bfloat16"), "bfloat16"))
def test_drafts_change_no_answer(dtype: str) -> None:
    """Single answers, and several samples that fork after a prompt."""
    prompts = random_tokens(3, 8, 21, 30, seed=3)
    with open_llm(dtype=dtype) as llm:
        for params in (PLAIN, SEVERAL):
            draft_with(llm.engine.client.core, None)
            outputs = ask(llm, prompts, params)
            for num, right in DRAFTERS:
                oracle = draft_from(llm, outputs, num, right)
                assert bits(ask(llm, prompts, params)) == bits(outputs), (num, right)
                assert oracle.num_tried > 40
                assert_idle(llm)


def test_drafts_change_no_answer_with_chunked_prompts() -> None:
    prompts = random_tokens(3, 30, 8, 37, 21, 33, seed=4)
    with open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        outputs = ask(plain, prompts, PLAIN)
    own = {"max_num_batched_tokens": 13, "max_num_seqs": 3}
    with open_llm(dtype="float32", **own) as llm:
        for num, right in [(4, 1.0), (4, 0.7), (9, 0.9)]:
            draft_from(llm, outputs, num, right)
            assert bits(ask(llm, prompts, PLAIN)) == bits(outputs)


@pytest.mark.parametrize("right", slow_but((1.0, 0.0, 0.8), 0.0, 0.8))
def test_next_turn_hits_the_state_after_the_last_answer(right: float) -> None:
    """As without drafts: a block that drafts have filled is named once they are accepted."""
    first, more = random_tokens(9, 6, seed=5)
    cached: list[int | None] = []
    for is_drafting in (False, True):
        with open_llm(dtype="float32") as llm:
            outputs = ask(llm, [first], PLAIN)
            if is_drafting:
                llm.reset_prefix_cache()
                oracle = draft_from(llm, outputs, 5, right)
                assert bits(ask(llm, [first], PLAIN)) == bits(outputs)
                assert oracle.num_tried
                draft_with(llm.engine.client.core, None)
            (turn,) = ask(llm, [[*first, *outputs[0].outputs[0].token_ids, *more]], PLAIN)
            cached.append(turn.num_cached_tokens)
    assert cached[0] and cached[0] > len(first) and cached[1] == cached[0]


@pytest.mark.parametrize(
    ("mode", "drafts"), in_turn(("swap", "recompute"), ((4, 1.0), (3, 0.0), (9, 0.9)))
)
def test_preemption_with_drafts_in_flight_changes_no_answer(
    mode: str, drafts: tuple[int, float]
) -> None:
    num, right = drafts
    prompts = random_tokens(*[20] * 8, seed=6)
    with open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        outputs = ask(plain, prompts, PLAIN)
    counts = []
    with open_llm(dtype="float32", preemption_mode=mode, enable_prefix_caching=False, **FEW) as llm:
        for _ in range(2):
            given = ask(llm, prompts, PLAIN)
            assert bits(given) == bits(outputs)
            assert_idle(llm)
            counts.append(sum(o.metrics.num_preemptions for o in given if o.metrics))
            draft_from(llm, outputs, num, right)
    assert counts[0] > 0 and counts[1] > 0, "no row was preempted, without or with drafts"


def test_evicted_blocks_are_restored_while_drafting() -> None:
    prompts = random_tokens(*[40] * 6, seed=3)
    with open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        outputs = ask(plain, prompts, PLAIN)
    own = {"max_num_seqs": 1, "kv_host_gb": 0.01}
    with open_llm(dtype="float32", **FEW, **own) as llm:
        draft_from(llm, outputs, 6, 0.9)
        for _ in range(2):
            again = [output for prompt in prompts for output in ask(llm, [prompt], PLAIN)]
            assert bits(again) == bits(outputs)
        assert all(output.num_cached_tokens for output in again)


def test_stop_token_among_drafts_ends_the_answer() -> None:
    prompts = random_tokens(10, 14, seed=7)
    with open_llm(dtype="float32") as llm:
        outputs = ask(llm, prompts, PLAIN)
        stops = [output.outputs[0].token_ids[11] for output in outputs]
        stopped = msgspec.structs.replace(PLAIN, stop_token_ids=stops)
        plain = ask(llm, prompts, stopped)
        draft_from(llm, outputs, 8, 1.0)
        assert bits(ask(llm, prompts, stopped)) == bits(plain)
        assert_idle(llm)


def test_memory_plan_counts_retained_inputs_of_drafts() -> None:
    """The plan, which `quire fit` uses, has the memory of the largest step. All rows together draft
    no more tokens than fit in it."""
    prompts = random_tokens(*[5] * 6, seed=8)
    with open_llm(dtype="bfloat16", max_num_seqs=6) as llm:
        draft_from(llm, ask(llm, prompts, PLAIN), 9, 1.0)
        ask(llm, prompts, PLAIN)
        runner = llm.engine.client.core.executor._built.runner  # type: ignore[attr-defined]
        counted = retained_inputs_bytes(llm.engine.config, llm.engine.spec)
        assert runner.model._retained._memory.nbytes == counted > 0
    with open_llm(dtype="bfloat16", speculative_config={"method": "none"}) as llm:
        assert retained_inputs_bytes(llm.engine.config, llm.engine.spec) == 0


@pytest.mark.parametrize(
    ("variant", "quantization"), in_turn(("qwen3_next", "qwen3_5_moe"), (None, "int8"))
)
def test_drafts_change_no_answer_of_moe_and_int8_models(
    variant: str, quantization: str | None, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, variant)
    prompts = random_tokens(5, 19, seed=9)
    own: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization, "block_size": P}
    with LLM(str(tmp_path), max_model_len=64, disable_log_stats=True, **own) as llm:
        outputs = ask(llm, prompts, PLAIN)
        for num, right in [(4, 1.0), (4, 0.7)]:
            draft_from(llm, outputs, num, right)
            assert bits(ask(llm, prompts, PLAIN)) == bits(outputs)


def test_drafts_change_no_answer_for_any_parameters() -> None:
    """Rows that may draft are batched with rows that may not, and with scored prompts."""
    common: dict[str, Any] = {"max_tokens": 15, "ignore_eos": True, "logprobs": 1}
    params = [
        SamplingParams(**common, seed=1, presence_penalty=0.4, min_p=0.02, logit_bias={4: 2.0}),
        SamplingParams(**common, seed=2, n=3, prompt_logprobs=1),
        SamplingParams(**common, temperature=0.0, dry_multiplier=0.8, dry_allowed_length=1),
        SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=15),
        SamplingParams(**common, seed=3, xtc_probability=0.7, xtc_threshold=0.05),
    ]
    prompts = [{"prompt_token_ids": p} for p in random_tokens(9, 17, 25, 12, 6, seed=10)]
    with open_llm(dtype="float32") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        oracle = draft_from(llm, outputs, 5, 0.8)
        again = llm.generate(prompts, params, use_tqdm=False)
        assert bits(again) == bits(outputs) and oracle.num_tried > 40
        assert [o.prompt_logprobs for o in again] == [o.prompt_logprobs for o in outputs]


@pytest.mark.parametrize(
    ("owner", "attribute"), [(VerifyStep, "_hidden"), (RecordedInputs, "settle")]
)
def test_failed_step_with_drafts_is_repeated(
    owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows return to states saved before the step, even if the step had saved some."""
    prompts = random_tokens(8, 21, 14, seed=11)
    with open_llm(dtype="float32") as llm:
        outputs = ask(llm, prompts, PLAIN)
        draft_from(llm, outputs, 5, 0.9)
        inner, calls = getattr(owner, attribute), list[int]()

        def failing(*arguments: Any) -> Any:
            calls.append(len(calls))
            found = inner(*arguments)
            if len(calls) == 3:
                raise RuntimeError("once")
            return found

        monkeypatch.setattr(owner, attribute, failing)
        assert bits(ask(llm, prompts, PLAIN)) == bits(outputs)
        assert len(calls) > 3
        assert_idle(llm)


METHODS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
    {"method": "suffix"},
    {"method": "draft_model"},
]


@pytest.mark.parametrize("settings", slow_but(METHODS, *METHODS[1:]), ids=lambda m: m["method"])
def test_every_drafting_method_works_with_states(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model's layers have a cache group after that of the states."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)  # draft on a slow machine, too
    if settings["method"] == "draft_model":
        settings = settings | {"model": str(checkpoint("llama"))}
    (part,) = random_tokens(7, seed=12)
    prompts = [part * 2, part * 3, part[:4] * 4]
    loop = SamplingParams(
        max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=1,
        logit_bias={5: 3.0, 6: 3.0, 7: 3.0},  # so few tokens that they repeat
    )  # fmt: skip
    with open_llm(dtype="float32") as plain:
        wanted = bits(ask(plain, prompts, loop)), bits(ask(plain, prompts, SEVERAL))
    with open_llm(dtype="float32", speculative_config=settings) as llm:
        outputs = ask(llm, prompts, loop)
        assert (bits(outputs), bits(ask(llm, prompts, SEVERAL))) == wanted
        assert any(output.metrics and output.metrics.num_draft_tokens for output in outputs)
        assert_idle(llm)

"""Models with states in the whole engine: transformers' tokens in float64, and the same bits in
every case. Requests are chunked, cached, forked, preempted, restored from other memory, or
restarted."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.ops.host.native import core
from quire.render.renderer import RenderedPrompt
from quire.scheduler.core.memory import PROMPT_TAIL
from quire.tools.verify.precision import WholePrecision
from tests.serve.test_exactness import CASES, NUM_TOKENS, assert_idle, greedy, prompts, tokens
from tests.serve.test_same_bits import found
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes, reference_tokens

ARCHITECTURE = "qwen3_5_text"
P = 4  # tokens of a block
FEW_BLOCKS = 30
MAX_TOKENS = 12
END = (40 - 1 - PROMPT_TAIL) // P * P  # where a prompt of 40 tokens leaves a state
EXACT: dict[str, Any] = {"dtype": "float64", "attention_backend": "torch"}
SAMPLED = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True, logprobs=2)
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


def folder() -> Path:
    return checkpoint(ARCHITECTURE)


def open_llm(**settings: Any) -> LLM:
    own: dict[str, Any] = {"max_model_len": 64, "block_size": P, "scheduling_policy": "fifo"}
    return LLM(str(folder()), disable_log_stats=True, **(own | settings))


@cache
def wanted(prompt: tuple[int, ...]) -> list[int]:
    with WholePrecision():
        return reference_tokens(folder(), list(prompt), MAX_TOKENS)


def expected(inputs: list[list[int]], counts: list[int]) -> list[list[int]]:
    return [wanted(tuple(p))[:count] for p, count in zip(inputs, counts, strict=True)]


def ask(llm: LLM, inputs: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in inputs], params, use_tqdm=False)


SLOW_CASES = (
    "one row", "more requests than rows", "block size 5", "depth 3, chunks", "defaults",
    "two tokens per step", "no prefix caching", "preemption", "block size 4, depth 2",
    "preemption, depth 2",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW_CASES else []) for case in CASES],
)
def test_tokens_match_transformers(case: str) -> None:
    counts = [min(count, MAX_TOKENS) for count in NUM_TOKENS]
    with CASES[case].open(folder()) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts(), [greedy(count) for count in counts])
            assert tokens(outputs) == expected(prompts(), counts)
            assert_idle(llm)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_prefix_hits_of_every_length_keep_the_tokens(step: int) -> None:
    """Prompts diverge from a cached one after each number of tokens, or each third."""
    first, other = random_tokens(40, 40, seed=1)
    parted = [first[:count] + other[count:] for count in range(1, 40, step)]
    with open_llm(**EXACT, enable_prefix_caching=False) as plain:
        alone = tokens(ask(plain, [first, *parted], greedy(5)))
    with open_llm(**EXACT, max_num_batched_tokens=11) as llm:
        assert tokens(ask(llm, [first], greedy(5))) == alone[:1]
        for prompt, want in zip(parted, alone[1:], strict=True):
            assert tokens(ask(llm, [prompt], greedy(5))) == [want]
        assert_idle(llm)


@pytest.mark.parametrize(
    ("count", "hits"),
    [(13, [0, 0, 12, END]), (20, [0, 0, 20, END]), (38, [0, END, END, END])],
)
def test_second_divergent_prompt_leaves_a_state_for_the_third(count: int, hits: list[int]) -> None:
    """The second prompt with the shared prefix finds no state; it leaves one for the third."""
    first, *others = random_tokens(40, 40, 40, seed=1)
    inputs = [first, *(first[:count] + other[count:] for other in others), first]
    with open_llm(**EXACT) as llm:
        outputs = [output for prompt in inputs for output in ask(llm, [prompt], greedy(6))]
    assert tokens(outputs) == expected(inputs, [6] * 4)
    assert [output.num_cached_tokens for output in outputs] == hits


def test_concurrent_prompts_with_a_shared_prefix_keep_their_tokens() -> None:
    first, *tails = random_tokens(21, 9, 9, 9, seed=2)
    inputs = [first, *(first + tail for tail in tails), first]
    with open_llm(**EXACT) as llm:
        for _ in range(2):
            outputs = ask(llm, inputs, greedy(6))
            assert tokens(outputs) == expected(inputs, [6] * len(inputs))
            assert_idle(llm)


def test_forks_after_every_token_match_single_requests() -> None:
    """Samples of prompts that end at each slot of a block, and beams, which fork at each token: in
    a batch and alone."""
    inputs = random_tokens(*range(1, 2 * P + 2), seed=3)
    several = SamplingParams(n=3, temperature=1.1, seed=5, max_tokens=7, ignore_eos=True)
    beams = SamplingParams(n=3, use_beam_search=True, max_tokens=7, ignore_eos=True)
    with open_llm(**EXACT, max_num_seqs=24) as llm, open_llm(**EXACT, block_size=64) as plain:
        for params in (several, beams):
            together = ask(llm, inputs, params)
            for prompt, output in zip(inputs, together, strict=True):
                plain.reset_prefix_cache()
                (alone,) = ask(plain, [prompt], params)
                assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
        assert_idle(llm)


@needs_core
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_leaves_outputs_bit_identical(mode: str) -> None:
    few: dict[str, Any] = {
        "kv_cache_memory_bytes": pool_bytes(folder(), FEW_BLOCKS, P, 4),
        "preemption_mode": mode,
        "enable_prefix_caching": False,
    }
    inputs = [*prompts(), *prompts()]
    with open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        alone = found(ask(plain, inputs, SAMPLED))
    with open_llm(dtype="float32", **few) as llm:
        outputs = ask(llm, inputs, SAMPLED)
        assert found(outputs) == alone
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics)
        assert_idle(llm)


@needs_core
@pytest.mark.parametrize("tier_kind", ["host", "disk"])
def test_evicted_blocks_return_with_their_state(tier_kind: str, tmp_path: Path) -> None:
    """They return from host memory, or from a directory in another engine."""
    inputs = random_tokens(*[40] * 6, seed=3)
    few: dict[str, Any] = {
        "kv_cache_memory_bytes": pool_bytes(folder(), FEW_BLOCKS, P, 4),
        "max_num_seqs": 1,
        "dtype": "float32",
    }
    with open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        alone = found(ask(plain, inputs, SAMPLED))
    tier = {"kv_host_gb": 0.01} if tier_kind == "host" else {"kv_disk_dir": str(tmp_path)}
    cached: list[int | None] = []
    llm = open_llm(**few, **tier)
    for turn in range(2):
        outputs = [output for prompt in inputs for output in ask(llm, [prompt], SAMPLED)]
        assert found(outputs) == alone
        cached += [output.num_cached_tokens for output in outputs]
        if tier_kind == "disk" and turn == 0:
            llm.close()
            llm = open_llm(**few, **tier)
    llm.close()
    assert cached == [0] * 6 + [END] * 6


@needs_core
@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.slow), "int8"])
def test_chunking_leaves_outputs_bit_identical(quantization: str | None) -> None:
    own: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    with open_llm(**own, enable_prefix_caching=False) as plain:
        alone = [found(ask(plain, [prompt], SAMPLED))[0] for prompt in prompts()]
    with open_llm(**own, max_num_batched_tokens=7) as llm:
        for _ in range(2):
            assert found(ask(llm, prompts(), SAMPLED)) == alone


def test_open_prompt_gives_the_tokens_of_the_whole_prompt() -> None:
    (whole,) = random_tokens(37, seed=6)
    with open_llm(**EXACT, max_num_batched_tokens=11) as llm:
        client, requests = llm.engine.client, llm.engine.requests
        made = requests.make(RenderedPrompt(whole[:5]), greedy(6))
        client.add(msgspec.structs.replace(made, is_open=True))
        for first, last in ((5, 6), (6, 21), (21, 36)):
            for _ in range(4):
                assert client.step() == []
            client.append(made.request_id, whole[first:last])
        client.append(made.request_id, whole[36:], is_last=True)
        outputs: list[RequestOutput] = []
        while not (outputs and outputs[-1].finished):
            outputs += client.step()
        assert_idle(llm)
    assert outputs[-1].outputs[0].token_ids == wanted(tuple(whole))[:6]

"""Models with states by the whole engine: the tokens of transformers in float64, and the same bits
in every case. Requests are chunked, cached, forked, preempted, moved to other memory, or restarted.
"""

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
MOST = 12
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
        return reference_tokens(folder(), list(prompt), MOST)


def expected(asked: list[list[int]], counts: list[int]) -> list[list[int]]:
    return [wanted(tuple(p))[:count] for p, count in zip(asked, counts, strict=True)]


def ask(llm: LLM, asked: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)


LONG = (
    "one row", "more requests than rows", "block size 5", "depth 3, chunks", "defaults",
    "two tokens per step", "no prefix caching", "preemption", "block size 4, depth 2",
    "preemption, depth 2",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in LONG else []) for case in CASES],
)
def test_tokens_are_those_of_transformers(case: str) -> None:
    counts = [min(count, MOST) for count in NUM_TOKENS]
    with CASES[case].open(folder()) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts(), [greedy(count) for count in counts])
            assert tokens(outputs) == expected(prompts(), counts)
            assert_idle(llm)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_hits_of_every_length(step: int) -> None:
    """Prompts that part from one that was there after each number of tokens, or each third."""
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
def test_where_prompts_part_is_learnt(count: int, hits: list[int]) -> None:
    """The second that begins so finds no state there and leaves one; the third begins behind it."""
    first, *others = random_tokens(40, 40, 40, seed=1)
    asked = [first, *(first[:count] + other[count:] for other in others), first]
    with open_llm(**EXACT) as llm:
        outputs = [output for prompt in asked for output in ask(llm, [prompt], greedy(6))]
    assert tokens(outputs) == expected(asked, [6] * 4)
    assert [output.num_cached_tokens for output in outputs] == hits


def test_prompts_that_begin_alike_in_one_step() -> None:
    first, *tails = random_tokens(21, 9, 9, 9, seed=2)
    asked = [first, *(first + tail for tail in tails), first]
    with open_llm(**EXACT) as llm:
        for _ in range(2):
            outputs = ask(llm, asked, greedy(6))
            assert tokens(outputs) == expected(asked, [6] * len(asked))
            assert_idle(llm)


def test_forks_behind_every_token() -> None:
    """Several answers to prompts that end at each place of a block, and beams, which fork at each
    token; beside each other and alone."""
    asked = random_tokens(*range(1, 2 * P + 2), seed=3)
    several = SamplingParams(n=3, temperature=1.1, seed=5, max_tokens=7, ignore_eos=True)
    beams = SamplingParams(n=3, use_beam_search=True, max_tokens=7, ignore_eos=True)
    with open_llm(**EXACT, max_num_seqs=24) as llm, open_llm(**EXACT, block_size=64) as plain:
        for params in (several, beams):
            together = ask(llm, asked, params)
            for prompt, output in zip(asked, together, strict=True):
                plain.reset_prefix_cache()
                (alone,) = ask(plain, [prompt], params)
                assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
        assert_idle(llm)


@needs_core
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_same_bits_where_rows_give_way(mode: str) -> None:
    few: dict[str, Any] = {
        "kv_cache_memory_bytes": pool_bytes(folder(), FEW_BLOCKS, P, 4),
        "preemption_mode": mode,
        "enable_prefix_caching": False,
    }
    asked = [*prompts(), *prompts()]
    with open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        alone = found(ask(plain, asked, SAMPLED))
    with open_llm(dtype="float32", **few) as llm:
        outputs = ask(llm, asked, SAMPLED)
        assert found(outputs) == alone
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics)
        assert_idle(llm)


@needs_core
@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_was_evicted_comes_back_with_its_state(place: str, tmp_path: Path) -> None:
    """From host memory, or from a directory in another engine."""
    asked = random_tokens(*[40] * 6, seed=3)
    few: dict[str, Any] = {
        "kv_cache_memory_bytes": pool_bytes(folder(), FEW_BLOCKS, P, 4),
        "max_num_seqs": 1,
        "dtype": "float32",
    }
    with open_llm(dtype="float32", enable_prefix_caching=False) as plain:
        alone = found(ask(plain, asked, SAMPLED))
    tier = {"kv_host_gb": 0.01} if place == "host" else {"kv_disk_dir": str(tmp_path)}
    cached: list[int | None] = []
    llm = open_llm(**few, **tier)
    for turn in range(2):
        outputs = [output for prompt in asked for output in ask(llm, [prompt], SAMPLED)]
        assert found(outputs) == alone
        cached += [output.num_cached_tokens for output in outputs]
        if place == "disk" and turn == 0:
            llm.close()
            llm = open_llm(**few, **tier)
    llm.close()
    assert cached == [0] * 6 + [END] * 6


@needs_core
@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.slow), "int8"])
def test_the_same_bits_however_a_prompt_is_cut(quantization: str | None) -> None:
    own: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    with open_llm(**own, enable_prefix_caching=False) as plain:
        alone = [found(ask(plain, [prompt], SAMPLED))[0] for prompt in prompts()]
    with open_llm(**own, max_num_batched_tokens=7) as llm:
        for _ in range(2):
            assert found(ask(llm, prompts(), SAMPLED)) == alone


def test_a_prompt_in_pieces() -> None:
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

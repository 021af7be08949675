"""The engine's greedy tokens match transformers in float64. A request gets the same tokens alone
as when it is batched, chunked, cached, preempted or pipelined."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from tests.support.models.reference_checkpoints import (
    ARCHITECTURES,
    CONFIGS,
    FAMILIES,
    checkpoint,
    confirmed_tokens,
    pool_bytes,
    reference_tokens,
    write_checkpoint,
)

LENGTHS = (1, 3, 40, 17, 33, 5, 52, 16, 24, 47)
NUM_TOKENS = (12, 1, 9, 14, 11, 12, 8, 2, 13, 10)
MAX_LEN = 64
WANTED = max(NUM_TOKENS)


def prompts() -> list[list[int]]:
    numbers = random.Random(5)
    return [[numbers.randrange(97) for _ in range(length)] for length in LENGTHS]


KNOWN: dict[Path, list[list[int]]] = {}


def expected(folder: Path, found: list[list[int]]) -> list[list[int]]:
    """Return the tokens that transformers gives for each prompt. found: the engine's tokens, which
    are faster to confirm than to generate again."""
    assert [len(tokens) for tokens in found] == list(NUM_TOKENS)
    if folder not in KNOWN:
        pairs = zip(prompts(), found, strict=True)
        KNOWN[folder] = [confirmed_tokens(folder, *pair) for pair in pairs]
    return KNOWN[folder]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def open_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float64", "max_model_len": MAX_LEN, "attention_backend": "torch"}
    defaults["scheduling_policy"] = "fifo"  # the first request computes the others' prefix hits
    return LLM(str(folder), disable_log_stats=True, **(defaults | settings))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.client.core.scheduler
    scheduler.check_invariants()
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert all(pool.num_used == 0 for pool in scheduler.memory.kv.pools), "blocks leak"


@dataclass
class Case:
    """Settings of an engine. pool_blocks: number of blocks of 4 tokens, few enough for preemption.

    The attention backend that real models use computes in float64 as well.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    pool_blocks: int | None = None

    def open(self, folder: Path) -> LLM:
        settings = dict(self.settings)
        if self.pool_blocks is not None:
            settings["block_size"] = 4
            settings["kv_cache_memory_bytes"] = pool_bytes(folder, self.pool_blocks, 4)
        return open_llm(folder, **settings)


CASES = {
    "defaults": Case(),
    "uneven chunks": Case({"max_num_batched_tokens": 7}),
    "two tokens per step": Case({"max_num_batched_tokens": 2, "max_num_seqs": 2}),
    "more requests than rows": Case({"max_num_seqs": 3}),
    "one row": Case({"max_num_seqs": 1, "block_size": 4, "max_num_batched_tokens": 7}),
    "block size 1": Case({"block_size": 1, "max_num_batched_tokens": 30}),
    "block size 4, depth 2": Case({"block_size": 4, "pipeline_depth": 2, "max_num_seqs": 5}),
    "block size 5": Case({"block_size": 5, "max_num_batched_tokens": 23}),
    "depth 3, chunks": Case({"pipeline_depth": 3, "max_num_batched_tokens": 19}),
    "no prefix caching": Case({"enable_prefix_caching": False, "max_num_seqs": 4}),
    "reference attention": Case({"attention_backend": "reference", "block_size": 4}),
    "preemption": Case(pool_blocks=18),
    "preemption, depth 2": Case({"pipeline_depth": 2}, pool_blocks=18),
    "preemption, depth 3, chunks": Case(
        {"pipeline_depth": 3, "max_num_batched_tokens": 60}, pool_blocks=18
    ),
    "preemption, no prefix caching": Case({"enable_prefix_caching": False}, pool_blocks=18),
}


# What matters for settings is which tokens a layer attends to: all (llama), a window (mistral), or
# a state (test_hybrid.py, and qwen3_5 here). A few other architectures get one of the two cases
# that combine the most settings.
LAYER_KINDS = ("llama", "mistral", "qwen3_5")
COMBINED = ("uneven chunks", "preemption, depth 2", "block size 4, depth 2", "one row")
QUICK = COMBINED[:2]
SLOW_FOR_LLAMA = (  # skipped for llama: mistral has them, or another case covers more
    "more requests than rows", "block size 1", "block size 5", "block size 4, depth 2", "one row",
    "no prefix caching", "uneven chunks", "defaults", "preemption", "preemption, depth 2",
    "two tokens per step",
)  # fmt: skip
WINDOW_CASES = (*QUICK, "one row", "block size 1")


def is_quick(name: str, case: str) -> bool:
    if name == "llama":
        return case not in SLOW_FOR_LLAMA
    if name == "mistral":
        return case in WINDOW_CASES
    if name == "qwen3_5":
        return case == QUICK[0]
    return name in ("qwen3_moe", "deepseek_v3") and case == quick_case_of(name)


def quick_case_of(name: str) -> str:
    return QUICK[list(CONFIGS).index(name) % 2]


def pairs() -> list[Any]:
    return [
        pytest.param(name, case, marks=[] if is_quick(name, case) else pytest.mark.slow)
        for name in ARCHITECTURES
        for case in CASES
    ]


@pytest.mark.parametrize(("architecture", "case"), pairs())
def test_tokens_match_transformers(architecture: str, case: str) -> None:
    folder = checkpoint(architecture)
    with CASES[case].open(folder) as llm:
        was_preempted = False  # in one of the runs: afterwards admission is slower
        for _ in range(2):  # the second run reuses rows and blocks, and has prefix hits
            outputs = llm.generate(prompts(), [greedy(count) for count in NUM_TOKENS])
            metrics = [output.metrics for output in outputs]
            was_preempted |= any(m is not None and m.num_preemptions > 0 for m in metrics)
            assert tokens(outputs) == expected(folder, tokens(outputs))
            assert_idle(llm)
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        assert was_preempted == (CASES[case].pool_blocks is not None)
        if not llm.engine.config.cache.enable_prefix_caching:
            assert not any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in LAYER_KINDS[1:] else pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_batched_tokens_match_single_requests(architecture: str) -> None:
    folder = checkpoint(architecture)
    with open_llm(folder, enable_prefix_caching=False) as llm:
        alone = [
            tokens(llm.generate([prompt], greedy(count)))[0]
            for prompt, count in zip(prompts(), NUM_TOKENS, strict=True)
        ]
        assert alone == expected(folder, alone)
        backwards = llm.generate(prompts()[::-1], [greedy(n) for n in NUM_TOKENS[::-1]])
        assert tokens(backwards)[::-1] == alone


PREFIX_SETTINGS = ((1, 1), (4, 2), (16, 3))


def prefix_cases() -> list[Any]:
    """Pair each architecture with each setting; `make test` has one setting per kind of layer."""
    return [
        pytest.param(
            name,
            *pair,
            marks=[] if name in LAYER_KINDS and (i - j) % 3 == 0 else pytest.mark.slow,
        )
        for i, name in enumerate(ARCHITECTURES)
        for j, pair in enumerate(PREFIX_SETTINGS)
    ]


@pytest.mark.parametrize(("architecture", "block_size", "depth"), prefix_cases())
def test_prefix_hits_do_not_change_tokens(architecture: str, block_size: int, depth: int) -> None:
    """In one call the first request computes the prefix once. A later call resumes after it, also
    within generated tokens. test_hybrid.py covers the hits of models with states."""
    folder = checkpoint(architecture)
    shared = prompts()[4][:32]
    inputs = [shared + tail for tail in ([5], [6, 7, 8], [9] * 10, [])]
    settings = {"block_size": block_size, "pipeline_depth": depth}
    with open_llm(folder, **settings) as llm:
        has_states = llm.engine.client.core.scheduler.memory.kv.has_states
        first = llm.generate(inputs, greedy(12))
        pairs = zip(inputs, tokens(first), strict=True)
        wanted = [confirmed_tokens(folder, *pair) for pair in pairs]
        assert tokens(first) == wanted and {len(each) for each in wanted} == {12}
        found = [o.num_cached_tokens for o in first[:3]]
        assert found == [0, 32, 32] or (has_states and found[0] == found[1] == 0 < found[2] <= 32)
        again = llm.generate(inputs, greedy(12))
        assert tokens(again) == wanted
        full = [len(prompt) - 1 - (len(prompt) - 1) % block_size for prompt in inputs]
        found = [o.num_cached_tokens for o in again]
        is_part = all(16 <= n <= limit for n, limit in zip(found, full, strict=True))
        assert found == full or (has_states and is_part)
        longer = inputs[0] + wanted[0][:8]
        (more,) = llm.generate([longer], greedy(4))
        assert tokens([more]) == [wanted[0][8:]]
        reached = len(longer) - 1 - (len(longer) - 1) % block_size
        assert more.num_cached_tokens == reached or has_states
        llm.reset_prefix_cache()
        (fresh,) = llm.generate([inputs[0]], greedy(12))
        assert (fresh.num_cached_tokens, tokens([fresh])) == (0, wanted[:1])
        assert_idle(llm)


def test_shared_prefix_is_computed_once_in_one_step() -> None:
    folder = checkpoint("llama")
    shared = prompts()[4][:32]
    with open_llm(folder, block_size=4) as llm:
        planned: list[Any] = []
        llm.engine.client.core.subscribe(planned.append)
        llm.generate([[*shared, token] for token in range(6)], greedy(2))
        sizes = [event.num_tokens for event in planned if type(event).__name__ == "Planned"]
        assert sizes == [32 + 6, 6]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(COMBINED[2:], marks=pytest.mark.slow)])
def test_model_with_full_and_window_layers_matches_transformers(
    cases: tuple[str, ...], tmp_path: Path
) -> None:
    """Two cache groups: this qwen2's first layer attends to all tokens, the second to a window."""
    config_class, model_class, fields = CONFIGS["qwen2"]
    mixed = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    CONFIGS["mixed"] = (config_class, model_class, fields | mixed)
    try:
        folder = write_checkpoint(tmp_path, "mixed", 97)
    finally:
        del CONFIGS["mixed"]
    for case in cases:
        assert_as_expected(folder, case, num_groups=2)


# Layers of two kinds, attention sinks, and chunked attention. The architectures above cover experts
# and latent vectors; the remaining families differ only in numbers.
QUICK_FAMILIES = ("gemma3_text", "gpt_oss", "llama4_text")


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(
            family,
            case,
            marks=[]
            if family in QUICK_FAMILIES and case == quick_case_of(family)
            else pytest.mark.slow,
        )
        for family in FAMILIES
        for case in COMBINED
    ],
)
def test_tokens_of_other_families_match_transformers(family: str, case: str) -> None:
    interleaved = ("gemma2", "gemma3_text", "cohere2", "gpt_oss", "qwen3_5_text", "llama4_text")
    has_two_kinds = family in interleaved
    assert_as_expected(checkpoint(family), case, num_groups=2 if has_two_kinds else 1)


def assert_as_expected(folder: Path, case: str, num_groups: int) -> None:
    with CASES[case].open(folder) as llm:
        assert len(llm.engine.spec.cache_groups) == num_groups
        for _ in range(2):
            outputs = llm.generate(prompts(), [greedy(count) for count in NUM_TOKENS])
            assert tokens(outputs) == expected(folder, tokens(outputs))
            assert_idle(llm)


def test_window_pool_serves_a_hit_that_fills_much_of_it() -> None:
    """The hit's blocks count towards the sequence's maximum, not in addition to it."""
    folder = checkpoint("mistral")
    line = prompts()[4] + prompts()[2]
    with open_llm(folder, max_num_seqs=1, max_num_batched_tokens=8, block_size=4) as llm:
        llm.generate([line[:33]], greedy(2))
        engine = llm.engine
        request = engine.requests.make(engine.renderer.render(line[:60]), greedy(2))
        engine.client.add(request)
        outputs = [output for _ in range(9) for output in engine.client.step()]
        assert tokens(outputs[-1:]) == [reference_tokens(folder, line[:60], 2)]
        assert outputs[-1].num_cached_tokens == 32

"""A request's tokens and log-probabilities are bit-identical alone, in a batch, in chunks,
preempted, and with prefix hits. This holds for every format of weights, on a CPU."""

from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.ops.host.native import core
from tests.serve.test_exactness import prompts
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

NUM_TOKENS = 10
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 per output": {"dtype": "float16", "quantization": "int8", "quantization_group_size": 0},
    "int8 keys and values": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "quantized_head": "int4"},
}
PROMPTS = prompts()[2:8]  # of 5 to 52 tokens
PARAMS = [
    SamplingParams(
        temperature=0.0 if i % 2 else 0.8,
        seed=i,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=3,
    )
    for i in range(len(PROMPTS))
]

Found = list[list[tuple[int, dict[int, float]]]]


def found(outputs: list[RequestOutput]) -> Found:
    """Return each request's tokens with their log-probabilities."""
    return [
        [
            (token, {t: logprob.logprob for t, logprob in entry.items()})
            for token, entry in zip(
                output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True
            )
        ]
        for output in outputs
    ]


def open_llm(architecture: str, **settings: Any) -> LLM:
    defaults = {"max_model_len": 64, "block_size": 4, "scheduling_policy": "fifo"}
    return LLM(str(checkpoint(architecture)), disable_log_stats=True, **(defaults | settings))


QUICK = {  # formats that quick runs test for each architecture
    "qwen3": ("int8 keys and values", "int4"),
    "qwen3_moe": ("float16",),
    "gpt2": ("int8 per output",),
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(architecture, name, marks=[] if name in quick else pytest.mark.slow)
        for architecture, quick in QUICK.items()
        for name in FORMATS
    ],
)
def test_outputs_are_bit_identical_however_a_request_is_run(architecture: str, name: str) -> None:
    settings = FORMATS[name]
    with open_llm(architecture, enable_prefix_caching=False, **settings) as llm:
        alone = [
            found(llm.generate([prompt], params))[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        assert found(llm.generate(PROMPTS, PARAMS)) == alone
    chunks = {"max_num_batched_tokens": 7}
    with open_llm(architecture, **chunks, **settings) as llm:
        assert found(llm.generate(PROMPTS, PARAMS)) == alone
        again = llm.generate(PROMPTS, PARAMS)
        assert found(again) == alone
        assert sum(output.num_cached_tokens or 0 for output in again) > 100
    for mode in ("recompute", "swap"):
        pool = pool_bytes(checkpoint(architecture), 18, 4, 4)
        pool = pool if name == "float32" else pool // 2
        few = {"kv_cache_memory_bytes": pool, "preemption_mode": mode}
        with open_llm(architecture, **few, **settings) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
            assert found(outputs) == alone
            assert any(o.metrics is not None and o.metrics.num_preemptions for o in outputs)

"""With plans in flight and the model on its own thread, each text equals that of depth 1."""

import functools
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.base.requests.outputs import CompletionOutput, Logprob
from quire.engine.executors.threaded import ThreadedExecutor
from tests.support.models.reference_checkpoints import pool_bytes, text_checkpoint

SHARED = "The quick brown fox jumps"
PROMPTS = [SHARED, SHARED + " over", "Hello", SHARED + " over the lazy dog", "0 1 2 3 4 5", "a"]

# Every decoding method, each with another prompt, so that all of them run together.
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 1},
    "filtered": {"seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    "penalised": {
        "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3,
    },
    "n": {"seed": 4, "n": 3},
    "best of": {"seed": 5, "n": 2, "best_of": 4},
    "beams": {"n": 3, "use_beam_search": True},
    "logprobs": {"seed": 6, "logprobs": 3},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 2, "max_tokens": 6},
    "at least": {"seed": 7, "min_tokens": 9},
    "bad words": {"seed": 8, "bad_words": ["the", "e"]},
    "one token": {"seed": 9, "max_tokens": 1},
    "long": {"seed": 10, "max_tokens": 40},
}  # fmt: skip
MAX_STEPS = 2000
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 6},
    "no prefix caching": {"enable_prefix_caching": False},
    "recompute": {"num_blocks": 34, "preemption_mode": "recompute"},
    "swap": {"num_blocks": 34, "preemption_mode": "swap"},
}


def open_llm(**settings: Any) -> LLM:
    folder = text_checkpoint()
    if num_blocks := settings.pop("num_blocks", None):
        settings["kv_cache_memory_bytes"] = pool_bytes(folder, num_blocks, 4)
    defaults = {"dtype": "float64", "max_model_len": 96, "block_size": 4, "max_num_seqs": 16}
    more = {"attention_backend": "torch", "disable_log_stats": True}
    return LLM(str(folder), **(defaults | more | settings))


def stops() -> list[dict[str, Any]]:
    """Return parameters with a stop string and a stop token from the middle of the free text."""
    with open_llm() as llm:
        free = llm.generate("Hello", SamplingParams(seed=11, max_tokens=24), use_tqdm=False)
    done = free[0].outputs[0]
    stop_token = {"stop_token_ids": [done.token_ids[9]]}
    return [{"seed": 11, "stop": done.text[7:10]}, {"seed": 11} | stop_token]


@functools.cache
def cases() -> tuple[list[str], list[SamplingParams]]:
    """Return a prompt and parameters for each decoding method."""
    methods = [*PARAMS.values(), *stops()]
    params = [
        SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | method)) for method in methods
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(PARAMS))] + ["Hello", "Hello"]
    return prompts, params


def shown(output: RequestOutput) -> list[Any]:
    """Return what a user sees of an output, without inexact numbers."""
    return [
        output.prompt_token_ids,
        [
            (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, ranks(c.logprobs))
            for c in output.outputs
        ],
        ranks(output.prompt_logprobs),
    ]


def ranks(positions: list[Any] | None) -> Any:
    if positions is None:
        return None
    return [p and {t: (item.rank, item.decoded_token) for t, item in p.items()} for p in positions]


def numbers(output: RequestOutput) -> list[float]:
    """Return all log-probabilities of an output."""
    found: list[float] = []
    completions: list[CompletionOutput] = output.outputs
    for completion in completions:
        found.append(completion.cumulative_logprob or 0.0)
        for position in completion.logprobs or ():
            found += [item.logprob for item in position.values()]
    for position in output.prompt_logprobs or ():
        items: list[Logprob] = list((position or {}).values())
        found += [item.logprob for item in items]
    return found


def run(llm: LLM, with_aborts: bool = False) -> list[RequestOutput]:
    """Run all requests together. with_aborts: a request is aborted at every third step."""
    client, done, names = llm.engine.client, dict[str, RequestOutput](), []
    for prompt, params in zip(*cases(), strict=True):
        request = llm.engine.requests.make(llm.engine.renderer.render(prompt), params.clone())
        client.add(request, prompt)
        names.append(request.request_id)
    for num_steps in range(MAX_STEPS):
        if len(done) == len(names):
            return [done[name] for name in names]
        done |= {output.request_id: output for output in client.step() if output.finished}
        aborted = names[num_steps % len(names)]
        if with_aborts and num_steps % 3 == 2 and aborted not in done:
            done |= {request.request_id: request.output() for request in client.abort([aborted])}
    raise AssertionError("a request does not finish")


@functools.cache
def at_depth_1() -> list[RequestOutput]:
    with open_llm() as llm:
        return run(llm)


def assert_idle(llm: LLM) -> None:
    core = llm.engine.client.core
    while core.has_work:  # plans in flight for sequences that have ended
        core.step()
    core.scheduler.check_invariants()
    assert all(pool.num_used == 0 for pool in core.scheduler.memory.kv.pools), "blocks leak"


QUICK = (("swap", 3),)  # chunks at depth 3: test_exactness.py


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        pytest.param(
            settings,
            depth,
            marks=[] if (settings, depth) in QUICK else pytest.mark.slow,
        )
        for settings in SETTINGS
        for depth in (1, 2, 3)
    ],
)
def test_every_decoding_method_matches_depth_1(settings: str, depth: int) -> None:
    wanted = at_depth_1()
    with open_llm(pipeline_depth=depth, **SETTINGS[settings]) as llm:
        is_threaded = isinstance(llm.engine.client.core.executor, ThreadedExecutor)
        assert is_threaded == (depth > 1)
        for _ in range(2):  # the second run has prefix hits
            outputs = run(llm)
            for mine, theirs in zip(outputs, wanted, strict=True):
                assert shown(mine) == shown(theirs)
                assert numbers(mine) == pytest.approx(numbers(theirs), abs=1e-9)
            assert_idle(llm)
        metrics = [output.metrics for output in outputs]
        was_preempted = any(m is not None and m.num_preemptions for m in metrics)
        assert was_preempted == ("num_blocks" in SETTINGS[settings])


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        ("defaults", 3),
        ("swap", 2),
        pytest.param("recompute", 3, marks=pytest.mark.slow),
        pytest.param("defaults", 2, marks=pytest.mark.slow),
        pytest.param("swap", 3, marks=pytest.mark.slow),
        pytest.param("recompute", 2, marks=pytest.mark.slow),
    ],
)
def test_aborts_leave_other_requests_unchanged(settings: str, depth: int) -> None:
    """Requests are aborted while they run or wait. Their tokens are the first ones of the full
    output."""
    with open_llm(pipeline_depth=depth, **SETTINGS[settings]) as llm:
        outputs = run(llm, with_aborts=True)
        assert_idle(llm)
    reasons = set()
    for mine, theirs in zip(outputs, at_depth_1(), strict=True):
        reasons |= {c.finish_reason for c in mine.outputs}
        if not any(c.finish_reason == "abort" for c in mine.outputs):
            assert shown(mine) == shown(theirs)
        elif len(mine.outputs) == 1:
            got = mine.outputs[0].token_ids
            assert got == theirs.outputs[0].token_ids[: len(got)]
    assert {"abort", "length"} <= reasons


@pytest.mark.parametrize("depth", [2, 3])
def test_closed_stream_does_not_affect_later_requests(depth: int) -> None:
    """The results in flight for the closed stream are dropped."""
    prompts, params = cases()
    wanted = at_depth_1()
    with open_llm(pipeline_depth=depth, max_num_seqs=1) as llm:
        for _ in range(3):
            pieces = llm.stream(prompts[1], params[1].clone())
            next(pieces)
            next(pieces)
            pieces.close()
            [output] = llm.generate(prompts[0], params[0], use_tqdm=False)
            assert shown(output) == shown(wanted[0])
        assert_idle(llm)

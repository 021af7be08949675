"""DRY, XTC and logits processors through the whole engine. A row's result does not depend on other
rows, and an error ends only its own request."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.requests.validation import RequestLimits
from quire.engine.recording.files import read_recording
from quire.ops.host import native
from quire.runner.sampling import extras
from quire.runner.sampling.extras import LogitsProcessors, ProcessorError, RowProcessors
from quire.tools.replay import replay_all
from tests.support.models.reference_checkpoints import checkpoint

PROMPTS = [{"prompt_token_ids": [(13 * i + j) % 97 for j in range(4 + 6 * i)]} for i in range(5)]


def favour(token: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[token + len(output)] += 100
        return logits

    return process


def seeded(**more: Any) -> SamplingParams:
    return SamplingParams(seed=5, max_tokens=10, ignore_eos=True, **more)


ROWS = [
    seeded(
        temperature=0.0, logit_bias={7: 9.0}, dry_multiplier=3.0, dry_allowed_length=1, dry_base=1.2
    ),
    seeded(temperature=1.1, xtc_probability=0.8, xtc_threshold=0.02),
    seeded(temperature=1.1, xtc_probability=0.8, xtc_threshold=0.02, min_p=0.05, logprobs=2),
    seeded(temperature=0.9, logits_processors=[favour(20), favour(10)], presence_penalty=0.5),
    seeded(temperature=0.8, top_p=0.9, dry_multiplier=1.0, n=2, logits_processors=[favour(40)]),
]


def tokens(llm: LLM, *places: int, params: list[SamplingParams] = ROWS) -> list[list[list[int]]]:
    prompts = [PROMPTS[place] for place in places]
    outputs = llm.generate(prompts, [params[place] for place in places], use_tqdm=False)
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {"max_num_batched_tokens": 24, "block_size": 4, "disable_log_stats": True}
    with LLM(str(checkpoint("llama")), dtype="float32", **settings) as found:
        yield found


def test_row_gives_equal_tokens_alone_and_in_any_batch(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = tokens(llm, *range(5))
    assert tokens(llm, *reversed(range(5))) == together[::-1]
    for place in range(5):
        assert tokens(llm, place) == together[place : place + 1]
    plain = [each.clone() for each in ROWS]
    for each in plain:
        each.dry_multiplier, each.xtc_probability, each.logits_processors = 0.0, 0.0, None
    for place, found in enumerate(tokens(llm, *range(5), params=plain)):
        assert found[0] != together[place][0], "the parameter has an effect"
    settings = {"block_size": 4, "disable_log_stats": True, "attention_backend": "torch"}
    monkeypatch.setattr(native, "core_for", lambda *tensors: None)
    with LLM(str(checkpoint("llama")), dtype="float32", pipeline_depth=2, **settings) as other:
        assert tokens(other, *range(5)) == together


def test_dry_stops_a_repetition(llm: LLM) -> None:
    common: dict[str, Any] = {"temperature": 0.0, "logit_bias": {7: 30.0}}
    params = [
        seeded(**common),
        seeded(**common, dry_multiplier=50.0),
        seeded(**common, dry_multiplier=50.0, dry_breaker_token_ids=[7]),
        seeded(**common, dry_multiplier=50.0, dry_allowed_length=5),
    ]
    plain, without, broken, later = (
        llm.generate([PROMPTS[0]], each, use_tqdm=False)[0].outputs[0].token_ids for each in params
    )
    assert plain == broken == [7] * 10
    assert without[:3] == [7, 7, 7] and without[3] != 7
    assert later[:6] == [7] * 6 and later[6] != 7


def test_processors_get_tokens_and_raw_logits_and_run_first(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int], int]] = []

    def with_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output, len(logits)))
        logits[[3, 4]] = 500
        return logits

    params = seeded(
        temperature=0.0, logits_processors=[with_prompt], bad_words=None, allowed_token_ids=[4, 5],
        logprobs=1,
    )  # fmt: skip
    (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [4] * 10
    prompt = PROMPTS[1]["prompt_token_ids"]
    assert seen == [(prompt, [4] * i, 97) for i in range(10)]
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][4].logprob < -1, "log-probabilities are of the raw logits"


def raises(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such thing")


def hangs(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    time.sleep(3)
    return logits


BAD: dict[str, tuple[Any, str]] = {
    "raises": (raises, "ValueError: no such thing"),
    "hangs": (hangs, "more than 1 s"),
    "nothing": (lambda output, logits: None, "not NoneType"),
    "shape": (lambda output, logits: logits[:-1], r"shape \(97,\), not \(96,\)"),
    "whole numbers": (lambda output, logits: logits.long(), "a tensor of logits"),
    "NaN": (lambda output, logits: logits * torch.nan, "NaN or infinity"),
    "infinity": (lambda output, logits: logits + torch.inf, "NaN or infinity"),
    "no token": (lambda output, logits: logits - torch.inf, "logits_processors .* no token"),
    "arguments": (lambda: None, "TypeError"),
    "exits": (lambda output, logits: exit(), "SystemExit"),
}


@pytest.mark.parametrize("kind", BAD)
def test_failing_processor_ends_its_own_request_only(llm: LLM, kind: str) -> None:
    function, message = BAD[kind]
    params = [seeded(temperature=0.0, logits_processors=[favour(3), function]), ROWS[3], ROWS[0]]
    failed, *others = llm.generate([PROMPTS[0], PROMPTS[3], PROMPTS[0]], params, use_tqdm=False)
    error = failed.outputs[0].error
    assert error is not None and re.search(message, error.message), error
    assert "logits" in error.message and failed.outputs[0].token_ids == []
    assert [each.outputs[0].token_ids for each in others] == [
        tokens(llm, 3)[0][0],
        tokens(llm, 0)[0][0],
    ]


def test_hanging_threads_are_abandoned_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "LIMIT_S", 0.05)
    monkeypatch.setattr(extras, "MAX_STUCK", 2)
    calls, may_continue = LogitsProcessors(), threading.Event()
    ids: list[int] = []

    def waits(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        ids.append(threading.get_ident())
        may_continue.wait(10)
        return logits

    logits = torch.zeros(5)
    for _ in range(2):
        with pytest.raises(ProcessorError, match="more than 0.05 s"):
            calls.run(RowProcessors([waits]), [1], [2], logits)
    assert len(set(ids)) == 2
    with pytest.raises(ProcessorError, match="2 calls before it"):
        calls.run(RowProcessors([favour(0)]), [1], [2], logits)
    may_continue.set()
    deadline = time.monotonic() + 10
    while any(thread.ident in ids for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "abandoned threads end"
        time.sleep(0.01)
    found = calls.run(RowProcessors([favour(0)]), [1], [2], logits)
    assert found.tolist() == [0, 100, 0, 0, 0]
    assert logits.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"dry_multiplier": -1.0}, "dry_multiplier"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_breaker_token_ids": ["x"]}, "dry_breaker_token_ids"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"xtc_threshold": 0.0}, "xtc_threshold"),
        ({"xtc_threshold": float("nan")}, "xtc_threshold"),
        ({"logits_processors": [5]}, "logits_processors"),
        ({"logits_processors": [{"nam": "x"}]}, "logits_processors"),
        ({"logits_processors": favour(1)}, "logits_processors"),
        ({"use_beam_search": True, "n": 2, "dry_multiplier": 1.0}, "dry_multiplier"),
    ],
)
def test_invalid_parameters_are_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=field) as raised:
        SamplingParams(**params)
    assert raised.value.field == field


def test_unregistered_processor_names_are_refused(llm: LLM) -> None:
    for unknown in ("unheard-of", {"name": "unheard-of", "kwargs": {"a": 1}}):
        with pytest.raises(RequestError, match="no logits processor 'unheard-of'"):
            llm.generate([PROMPTS[0]], SamplingParams(logits_processors=[unknown]), use_tqdm=False)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_functions_are_neither_sent_nor_recorded(tmp_path: Path, has_tokens: bool) -> None:
    params = ROWS[3]
    limits = RequestLimits(97, 60, 20, 4, takes_functions=False)
    with pytest.raises(RequestError, match="cannot be sent to an engine in another process"):
        limits.check(Request("r", [1, 2], params, 0))
    folder = tmp_path / "run"
    settings = {"dtype": "float32", "block_size": 4, "disable_log_stats": True}
    settings |= {"record": str(folder), "record_tokens": has_tokens}
    with LLM(str(checkpoint("llama")), **settings) as llm:
        assert len(tokens(llm, 3)[0][0]) == 10
    replayed = replay_all(read_recording(folder))
    assert replayed.num_requests == 1 and replayed.difference is None

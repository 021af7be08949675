"""Several samples of one prompt in `LLM`: n, best_of, streams, stopping and errors."""

import itertools
import sys
from collections.abc import Iterator

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import RequestError
from quire.base.requests.outputs import CompletionOutput, RequestMetrics
from quire.serve.processes.progress import RequestBar
from tests.serve.test_llm import PROMPTS, assert_idle, open_llm
from tests.support.cases import slow_but

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_num_seqs=8) as shared:
        yield shared
        assert_idle(shared)


def sampled(**more: object) -> SamplingParams:
    return SamplingParams(**({"seed": 5, "max_tokens": 12, "ignore_eos": True} | more))  # type: ignore[arg-type]


def only(outputs: list[RequestOutput]) -> list[CompletionOutput]:
    [output] = outputs
    assert output.finished
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return output.outputs


def test_n_samples_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    """The samples of a smaller n are the first ones of a larger n."""
    four = only(llm.generate(PROMPT, sampled(n=4)))
    assert len({tuple(completion.token_ids) for completion in four}) == 4
    assert all(len(completion.token_ids) == 12 for completion in four)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(PROMPT)
    for completion in four:
        assert PROMPT + completion.text == tokenizer.decode(
            ids + completion.token_ids, skip_special_tokens=True
        )
    assert only(llm.generate(PROMPT, sampled(n=2))) == four[:2]
    assert only(llm.generate(PROMPT, sampled())) == four[:1]


@pytest.mark.parametrize("depth", slow_but((1, 2), 1))
def test_prompts_with_different_n_match_single_requests(llm: LLM, depth: int) -> None:
    """There are more sequences than rows."""
    params = [sampled(n=n, seed=n) for n in (3, 1, 4, 2)]
    with open_llm(pipeline_depth=depth, max_num_seqs=5) as small:
        outputs = small.generate(PROMPTS, params)
        assert [output.prompt for output in outputs] == PROMPTS
        assert [len(output.outputs) for output in outputs] == [3, 1, 4, 2]
        for prompt, own, output in zip(PROMPTS, params, outputs, strict=True):
            assert output.outputs == only(llm.generate(prompt, own))
        assert_idle(small)


def test_n_samples_compute_the_prompt_once(llm: LLM) -> None:
    with open_llm(max_num_seqs=8, enable_prefix_caching=False) as plain:
        num_tokens: list[int] = []
        core = plain.engine.client.core
        core.subscribe(lambda event: num_tokens.append(getattr(event, "num_tokens", 0)))
        one = only(plain.generate(PROMPT, sampled(n=4, max_tokens=1)))
        num_prompt = len(plain.get_tokenizer().encode(PROMPT))
        assert len(one) == 4 and max(num_tokens) == num_prompt


def test_chat_supports_n(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": PROMPT}]
    [output] = llm.chat(messages, sampled(n=3), chat_template=template)
    assert [c.token_ids for c in output.outputs] == [
        c.token_ids for c in only(llm.generate(output.prompt or "", sampled(n=3)))
    ]


@pytest.mark.parametrize("depth", slow_but((1, 2), 2))
def test_stream_of_n_samples_matches_generate(llm: LLM, depth: int) -> None:
    params = sampled(n=3, logprobs=1, stop=["e", "zz"])
    whole = only(llm.generate(PROMPT, params))
    with open_llm(pipeline_depth=depth, max_num_seqs=4) as other:
        parts = list(other.stream(PROMPT, params))
        assert_idle(other)
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    for index, expected in enumerate(whole):
        mine = [c for part in parts for c in part.outputs if c.index == index]
        assert "".join(c.text for c in mine) == expected.text
        assert list(itertools.chain(*[c.token_ids for c in mine])) == expected.token_ids
        assert [row for c in mine for row in c.logprobs or ()] == expected.logprobs
        ends = [(c.finish_reason, c.stop_reason) for c in mine]
        assert ends[-1] == (expected.finish_reason, expected.stop_reason)
        assert all(end == (None, None) for end in ends[:-1])


def test_closing_a_stream_of_n_samples_aborts_all(llm: LLM) -> None:
    stream = llm.stream(PROMPT, sampled(n=3, max_tokens=60))
    next(stream)
    next(stream)
    assert llm.engine.client.core.scheduler.num_running == 3
    stream.close()
    assert_idle(llm)


def test_stop_string_ends_only_its_own_sample(llm: LLM) -> None:
    free = only(llm.generate(PROMPT, sampled(n=4, max_tokens=24)))
    stop = next(
        char
        for char in free[2].text[6:]
        if char.isascii() and any(char not in completion.text for completion in free)
    )
    stopped = only(llm.generate(PROMPT, sampled(n=4, max_tokens=24, stop=stop)))
    assert {completion.finish_reason for completion in stopped} == {"stop", "length"}
    for before, after in zip(free, stopped, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.stop_reason == (stop if stop in before.text else None)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_returns_the_most_probable_samples(llm: LLM, logprobs: int | None) -> None:
    every = only(llm.generate(PROMPT, sampled(n=6, logprobs=1)))
    by_rank = sorted(every, key=lambda c: c.cumulative_logprob or 0.0, reverse=True)
    [output] = llm.generate(PROMPT, sampled(n=2, best_of=6, logprobs=logprobs))
    assert [c.token_ids for c in only([output])] == [c.token_ids for c in by_rank[:2]]
    assert [c.text for c in output.outputs] == [c.text for c in by_rank[:2]]
    shown = [c.logprobs for c in output.outputs]
    assert shown == ([None, None] if logprobs is None else [c.logprobs for c in by_rank[:2]])
    assert output.metrics is not None and output.metrics.num_dropped_tokens == 4 * 12
    same = only(llm.generate(PROMPT, sampled(n=3, best_of=3)))
    assert [c.token_ids for c in same] == [c.token_ids for c in every[:3]]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 9}, "n=9 is more than max_num_seqs=8"),
        ({"best_of": 9}, "best_of=9 is more than max_num_seqs=8"),
    ],
)
def test_more_samples_than_rows_are_rejected(llm: LLM, params: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, sampled(**params))
    assert_idle(llm)


def test_best_of_cannot_be_streamed(llm: LLM) -> None:
    with pytest.raises(RequestError, match="best_of=3 needs an answer in one piece"):
        next(llm.stream(PROMPT, sampled(n=1, best_of=3)))
    assert_idle(llm)


def test_progress_bar_counts_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    completions = [CompletionOutput(index, "a", [1, 2]) for index in range(3)]
    metrics = RequestMetrics(0.0, num_dropped_tokens=4)
    output = RequestOutput("r", "a", [1] * 7, None, completions, True, metrics)
    with RequestBar(6, enabled=True) as bar:
        bar.finished(output)
        assert bar._shown is not None
        [task] = bar._shown.tasks
        assert (task.completed, task.total) == (3, 6)
        assert bar._num_tokens == [7, 10], "tokens that best_of dropped count, too"

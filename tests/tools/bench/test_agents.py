"""`bench agents` against a scripted server, and the number of reusable tokens."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.tools.bench import agents
from quire.tools.bench.agent_sessions import SHAPES, draw_sessions
from quire.tools.bench.agents import Known, Run, TurnResult, summary
from quire.tools.bench.arguments import add_agents_arguments
from quire.tools.bench.metrics import RequestResult
from tests.support.serve.fake_openai import FakeOpenAI, running


class FakeWithIds(FakeOpenAI):
    """A server that reports token ids, and `cached` prompt tokens as reused."""

    cached = 0

    def _payloads(self, body: dict[str, Any], prompt: Any) -> Iterator[Any]:
        num, ids = body["max_tokens"], [*prompt]
        for i in range(num):
            choice = {"text": "a", "token_ids": [7000 + i]}
            yield {"choices": [choice | ({} if i else {"prompt_token_ids": ids})]}
        tiers = {"device": self.cached - 1, "store": 1} if self.cached else {}
        details = {"cached_tokens": self.cached, "cached_tokens_by_tier": tiers}
        details |= {"cache_miss": {"reason": "evicted"}}
        usage = {"prompt_tokens": len(ids), "completion_tokens": num}
        yield {"choices": [], "usage": usage | {"prompt_tokens_details": details}}
        yield "[DONE]"


def bench(fake: FakeOpenAI, line: str) -> int:
    parser = argparse.ArgumentParser()
    add_agents_arguments(parser)
    with running(fake) as url:
        return agents.run(parser.parse_args(f"--base-url {url} --disable-tqdm {line}".split()))


def test_known_prefixes_are_found() -> None:
    known, long = Known(), list(range(200))
    assert known.num_common(long) == 0
    known.add(long[:150])
    known.add([*long[:130], 9, 9])
    assert known.num_common(long) == 150
    assert known.num_common(long[:70]) == 70
    assert known.num_common([*long[:131], 9]) == 131
    assert known.num_common([*long[:130], 9, 8]) == 131
    assert known.num_common([5]) == 0


def test_two_turns_report_reusable_and_reused_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second prompt repeats the first prompt and its answer, whose last token has no KV."""
    trace, out, fake = tmp_path / "trace", tmp_path / "out.json", FakeWithIds()
    turns = [{"text": "abc", "output_length": 3}, {"text": "de", "output_length": 2}]
    trace.write_text(json.dumps({"session_id": "1", "turns": turns}) + "\n", encoding="utf-8")
    fake.cached = 4
    assert bench(fake, f"--trace {trace} --num-alone 0 --output-json {out}") == 0
    prompts = [body["prompt"] for body in fake.bodies]
    first = [ord(letter) for letter in "abc"]
    assert prompts == [first, [*first, 7000, 7001, 7002, ord("d"), ord("e")]]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["prompt_tokens"], found["output_tokens"]) == (11, 5)
    assert (found["reusable_tokens"], found["reused_tokens"]) == (5, 4)
    assert found["cached_tokens_by_tier"] == {"device": 6, "store": 2}
    assert found["recomputed_tokens_by_reason"] == {"evicted": 1}
    assert len(found["median_ttft_ms_by_turn"]) == 2 and found["times_alone"] == {}
    assert "Reused of it (%):                            80.00" in capsys.readouterr().out


def test_subagents_fork_and_return() -> None:
    """A subagent's prompt begins with its parent's context, and the parent's next prompt includes
    the subagent's answer."""
    fake = FakeWithIds()
    line = "--shape agentx --scale 0.001 --num-sessions 3 --num-alone 1 --speed inf --arrival-s 0"
    assert bench(fake, line) == 0
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    answers = {tuple(body["prompt"]): body["max_tokens"] for body in fake.bodies}
    sessions = draw_sessions(SHAPES["agentx"], 3, 0.001, 0.0, 0)
    [parent] = {each.parent for each in sessions if each.parent is not None}
    children = [each for each in sessions if each.parent == parent]
    ends, results = 0, 0
    for prompt in prompts:
        whole = (*prompt, *range(7000, 7000 + answers[prompt]))
        later = [other for other in prompts if other[: len(whole)] == whole]
        ends += not later
        for num in {child.turns[-1].num_output for child in children}:
            answer = (*range(7000, 7000 + num),)
            results += any(other[len(whole) :][:num] == answer for other in later)
    assert ends == len(sessions) + 1  # plus the session that was played alone
    assert results >= 1


def test_failures_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--shape codex --scale 0.001 --num-sessions 1 --num-alone 0 --speed inf"
    assert bench(FakeOpenAI(), line) == 1
    captured = capsys.readouterr()
    assert "the server does not report token ids (return_token_ids)" in captured.err
    assert "Turns, and failed ones:                      0, 1" in captured.out


def result(start_s: float, latency_s: float) -> RequestResult:
    return RequestResult(start_s, 10, latency_s, ttft_s=latency_s / 2, output_len=1)


def test_jobs_are_compared_with_the_same_jobs_alone() -> None:
    """Times exclude pauses and include subagents."""
    crowd = Run([TurnResult(0, 0, result(0, 2.0), 0), TurnResult(0, 0, result(1, 4.0), 0)])
    alone = Run([TurnResult(0, 0, result(0, 1.0), 0), TurnResult(0, 0, result(1, 2.0), 0)])
    crowd.job_s, alone.job_s = {0: 60.0, 4: 3.0}, {0: 3.5}
    found = summary(crowd, alone)
    assert found["times_alone"]["mean"] == 2.0 and found["num_alone"] == 1
    assert found["job_s"]["max"] == 60.0 and found["turns_s"]["max"] == 6.0
    assert found["reuse"] == 1.0

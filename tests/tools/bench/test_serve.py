"""`bench serve` end to end against a scripted server. No test depends on durations.

Covers `tools/bench/bench_request.py` and `tools/bench/drafts.py`.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.tools.bench import bench_request, serve
from quire.tools.bench.arguments import add_serve_arguments
from quire.tools.bench.datasets import BenchRequest
from quire.tools.bench.metrics import RequestResult
from quire.tools.http_client import HttpError
from tests.support.serve.fake_openai import FakeOpenAI, running

SMALL = "--disable-tqdm --num-prompts 6 --input-len 5 --output-len 7"


def options(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parser.parse_args(line.split())


def bench(fake: FakeOpenAI, line: str) -> int:
    with running(fake) as url:
        return serve.run(options(f"--base-url {url} {SMALL} {line}"))


def test_run_prints_and_writes_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "serve.json"
    assert bench(FakeOpenAI(), f"--output-json {path} --metric-percentiles 50,99") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "============ Serving Benchmark Result ============"
    assert "Total input tokens:                      30        " in printed
    assert (
        "Total generated tokens:                  42        " in printed
    )  # counted by usage, not by chunks
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["model_id"], written["backend"], written["request_rate"]) == (
        "fake", "openai", "inf",
    )  # fmt: skip
    assert (written["completed"], written["failed"], written["total_output_tokens"]) == (6, 0, 42)
    assert written["p50_ttft_ms"] > 0 and written["mean_e2el_ms"] >= written["mean_ttft_ms"]
    assert "ttfts" not in written
    assert {"cpu", "date"} <= written["machine"].keys()


def counters(drafts: int, tokens: int, *accepted_at: int) -> str:
    """Return the metrics of a server with draft tokens and two engines."""
    lines = []
    for engine, share in (("0", 1), ("1", 2)):
        values = {"drafts": drafts, "draft_tokens": tokens, "accepted_tokens": sum(accepted_at)}
        for name, value in values.items():
            series = f'quire:spec_decode_num_{name}_total{{engine="{engine}"}}'
            lines.append(f"{series} {value * share}")
        for i, value in enumerate(accepted_at):
            series = "quire:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{series}{{engine="{engine}",position="{i}"}} {value * share}')
    return "\n".join(lines) + "\n"


def test_acceptance_covers_the_run_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Labels and keys are vLLM's. The rate of a position is its share of all drafts."""
    path = tmp_path / "serve.json"
    fake = FakeOpenAI(metrics=[counters(1, 4, 1), counters(11, 44, 9, 5, 1)])
    assert bench(fake, f"--output-json {path}") == 0
    printed = capsys.readouterr().out.splitlines()
    first = printed.index("---------------Speculative Decoding---------------")
    assert [line.split() for line in printed[first + 1 :]] == [
        ["Acceptance", "rate", "(%):", "35.00"], ["Acceptance", "length:", "2.40"],
        ["Drafts:", "30"], ["Draft", "tokens:", "120"], ["Accepted", "tokens:", "42"],
        ["Per-position", "acceptance", "(%):"], ["Position", "0:", "80.00"],
        ["Position", "1:", "50.00"], ["Position", "2:", "10.00"], ["=" * 50],
    ]  # fmt: skip
    written = json.loads(path.read_text(encoding="utf-8"))
    named = {k.removeprefix("spec_decode_"): v for k, v in written.items() if "spec_decode" in k}
    assert named == {
        "acceptance_rate": 35.0, "acceptance_length": 2.4, "num_drafts": 30, "draft_tokens": 120,
        "accepted_tokens": 42, "per_position_acceptance_rates": [0.8, 0.5, 0.1],
    }  # fmt: skip


@pytest.mark.parametrize("metrics", [[], [counters(3, 9, 2)] * 2, ["what?\n", "{"]])
def test_run_without_drafts_prints_no_acceptance(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, metrics: list[str]
) -> None:
    """The same holds for a server without metrics, or with other metrics."""
    assert bench(FakeOpenAI(metrics=metrics), f"--output-json {tmp_path / 'out.json'}") == 0
    assert "Speculative" not in capsys.readouterr().out
    assert "spec_decode" not in (tmp_path / "out.json").read_text(encoding="utf-8")


def test_bodies_and_headers_follow_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    fake = FakeOpenAI()
    sampling = '--temperature 0.5 --top-k 3 --ignore-eos --logprobs 2 --extra-body {"priority":4}'
    bench(fake, f"{sampling} --header X-A=b=c X-D=e --num-prompts 1 --num-warmups 2")
    assert len(fake.bodies) == 3
    body = fake.bodies[0]
    prompt = body.pop("prompt")
    assert len(prompt) == 5 and all(0 <= token < 1000 for token in prompt)
    assert body == {
        "model": "fake", "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.5, "top_k": 3, "ignore_eos": True, "logprobs": 2, "priority": 4,
    }  # fmt: skip
    headers = fake.headers[0]
    assert (headers["authorization"], headers["x-a"]) == ("Bearer secret", "b=c")


def test_chat_sends_texts(tmp_path: Path) -> None:
    fake, path = FakeOpenAI(), tmp_path / "out.json"
    line = f"--backend openai-chat --model m --logprobs 1 --output-json {path} --save-detailed"
    assert bench(fake, line) == 0
    body = fake.bodies[0]
    assert body["messages"][0]["role"] == "user" and len(body["messages"][0]["content"]) == 5
    assert (body["model"], body["max_completion_tokens"]) == ("m", 7)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["generated_texts"] == ["abababa"] * 6
    assert [len(gaps) for gaps in written["itls"]] == [3] * 6  # the chunk with the role is no token
    assert written["output_lens"] == [7] * 6


def test_requests_are_open_together_without_a_limit() -> None:
    fake = FakeOpenAI(gate=6)  # no answer before all requests have arrived
    assert bench(fake, "") == 0
    assert fake.most_open == 6


def test_max_concurrency_limits_open_requests() -> None:
    fake = FakeOpenAI(gate=2)
    assert bench(fake, "--max-concurrency 2") == 0
    assert fake.most_open == 2
    assert len(fake.bodies) == 6


def test_failures_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    seen = FakeOpenAI()
    bench(seen, "")
    first = seen.bodies[0]["prompt"][0]
    capsys.readouterr()
    assert bench(FakeOpenAI(refuse={first: 400}), "") == 0
    captured = capsys.readouterr()
    assert "Failed requests:                         1         " in captured.out
    assert f"failed: the server answered 400: no prompt may begin with {first}" in captured.err


def test_run_with_only_failures_exits_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(FakeOpenAI(usage=False), "") == 1
    captured = capsys.readouterr()
    assert "Failed requests:                         6         " in captured.out
    assert captured.err.count("ended without usage") == 1  # equal errors are shown once


def test_failed_warm_up_ends_the_benchmark() -> None:
    with pytest.raises(HttpError, match="the warm-up failed: .* without usage"):
        bench(FakeOpenAI(usage=False), "--num-warmups 1")


def test_server_counts_the_tokens_of_text_prompts(tmp_path: Path) -> None:
    path, fake = tmp_path / "prompts.jsonl", FakeOpenAI()
    path.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    assert bench(fake, f"--dataset-name custom --dataset-path {path}") == 0
    assert {body["prompt"] for body in fake.bodies} == {"hello"}


def test_result_files_are_named_by_date(tmp_path: Path) -> None:
    assert bench(FakeOpenAI(), f"--save-result --result-dir {tmp_path} --max-concurrency 3") == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-infqps-concurrency3-fake-2")
    assert json.loads(path.read_text(encoding="utf-8"))["completed"] == 6


def test_missing_server_is_reported() -> None:
    with pytest.raises(HttpError, match="is the server running"):
        serve.run(options("--port 1 --disable-tqdm"))


def test_wait_for_a_server_has_a_timeout() -> None:
    with pytest.raises(HttpError, match="is the server running"):
        serve.run(options("--port 1 --ready-check-timeout-sec 0.01"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--percentile-metrics ttft,speed", "--percentile-metrics knows ttft, .* not 'speed'"),
        ("--metric-percentiles 101", "'101' is not a number from 0 to 100"),
        ("--goodput ttft", "--goodput: '' is not a number"),
        ("--goodput itl:5", "--goodput knows ttft, tpot, e2el, not 'itl'"),
        ("--header nonsense", "is not NAME=VALUE"),
        ("--base-url host:80", "is not a server's address"),
        ("--model m --extra-body [1]", "must be a JSON object"),
        ("--model m --extra-body {", "not valid JSON"),
    ],
)
def test_invalid_options_are_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve.run(options(line))


def load(rate: float, burstiness: float = 1.0, seed: int = 0) -> serve.Load:
    return serve.Load(rate, burstiness, None, seed)


def test_arrival_times_follow_rate_seed_and_burstiness() -> None:
    assert load(float("inf")).arrivals_s(3) == [0.0] * 3
    times = load(20.0).arrivals_s(2000)
    assert times == sorted(times) and times[-1] == pytest.approx(100.0)
    assert times == load(20.0).arrivals_s(2000) != load(20.0, seed=1).arrivals_s(2000)

    def spread(burstiness: float) -> float:
        """Standard deviation of the gaps over their mean: 1 / sqrt(burstiness)."""
        at = load(20.0, burstiness).arrivals_s(20_000)
        gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
        mean = sum(gaps) / len(gaps)
        return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    assert spread(1.0) == pytest.approx(1.0, rel=0.05)
    assert spread(4.0) == pytest.approx(0.5, rel=0.05)
    assert spread(0.25) == pytest.approx(2.0, rel=0.05)


def test_requests_are_not_sent_early() -> None:
    rate, sent = 400.0, []

    async def send(request: BenchRequest) -> RequestResult:
        sent.append(asyncio.get_running_loop().time())
        return RequestResult(0.0, 1)

    requests = [BenchRequest([1], 1, 1)] * 8
    outcome = asyncio.run(serve.send_all(send, requests, load(rate), lambda: None))
    due = load(rate).arrivals_s(8)
    assert outcome.duration_s >= due[-1]  # none early
    assert all(at - sent[0] >= when - due[0] - 0.01 for at, when in zip(sent, due, strict=True))


def read(is_chat: bool, *chunks: tuple[float, dict[str, Any]]) -> RequestResult:
    reading = bench_request._Reading(RequestResult(10.0, 3), is_chat)
    for now_s, chunk in chunks:
        reading.take(json.dumps(chunk), now_s)
    return reading.finish()


def test_stream_times_are_measured() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 5}
    result = read(
        False,
        (10.5, {"choices": [{"text": "a"}]}),
        (10.75, {"choices": [{"text": ""}], "usage": None}),
        (11.5, {"choices": [{"text": "b", "finish_reason": "length"}]}),
        (19.0, {"choices": [], "usage": usage}),
    )
    assert (result.ttft_s, result.itls_s, result.latency_s) == (0.5, [0.25, 0.75], 1.5)
    assert (result.prompt_len, result.output_len, result.text) == (4, 5, "ab")


def test_errors_within_a_stream_are_raised() -> None:
    with pytest.raises(HttpError, match="the engine died"):
        read(False, (11.0, {"error": {"message": "the engine died"}}))
    with pytest.raises(HttpError, match="without a chunk"):
        read(False, (11.0, {"choices": [], "usage": {"completion_tokens": 0}}))


@pytest.mark.parametrize("usage", [7, {}, {"completion_tokens": {}}])
def test_malformed_chunks_count_as_failures(
    usage: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
    monkeypatch.setattr(FakeOpenAI, "_payloads", lambda self, body, prompt: iter(chunks))
    assert bench(FakeOpenAI(), "") == 1
    assert "failed: " in capsys.readouterr().err

"""`quire bench`: help, wrong options, and a small run of each kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.tools.bench import throughput
from quire.tools.limits import Limits
from tests.support.commands import run
from tests.support.serve.fake_openai import FakeOpenAI, running


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("throughput", ("--num-prompts", "--input-len", "--rounds", "--block-size", "--dtype")),
        ("agents", ("--shape", "--trace", "--num-sessions", "--scale", "--speed", "--num-alone")),
        ("latency", ("--batch-size", "--num-iters", "--num-iters-warmup", "--block-size")),
        (
            "serve",
            (
                "--request-rate",
                "--burstiness",
                "--endpoint",
                "--goodput",
                "--save-result",
                "--base-url",
            ),
        ),
    ],
)
def test_help_lists_the_options_of_each_kind(
    capsys: pytest.CaptureFixture[str], kind: str, flags: tuple[str, ...]
) -> None:
    status, out, _ = run(capsys, "bench", kind, "--help", "all")
    assert status == 0
    requests = () if kind in ("latency", "agents") else ("--dataset-name",)
    for flag in (*flags, *requests, "--output-json", "--seed"):
        assert flag in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "KIND"),
        ("sleep", "invalid choice"),
        ("throughput --dataset-name nothing", "invalid choice: 'nothing'"),
        ("throughput --num-prompts 0", "0 is below 1"),
        ("serve --num-prompts many", "invalid int value: 'many'"),
        ("serve --request-rate 0", "0 is not above 0"),
        ("serve --random-range-ratio 1", "1 is not in [0, 1)"),
        ("agents --scale 0", "0 is not a number above 0"),
        ("serve --backend tgi", "invalid choice: 'tgi'"),
    ],
)
def test_wrong_usage_exits_with_status_2(
    capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    status, _, err = run(capsys, "bench", *line.split())
    assert status == 2
    assert words in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serve --port 1 --disable-tqdm", "nothing answers at http://127.0.0.1:1"),
        ("throughput --dataset-name sharegpt", "needs --dataset-path"),
        ("throughput --model ./nowhere", "there is no directory ./nowhere"),
        ("latency --enable-prefix-caching", "the prefix cache would skip the prompts"),
    ],
)
def test_impossible_measurements_are_refused(
    capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    status, _, err = run(capsys, "bench", *line.split())
    assert status == 1
    assert err.startswith("quire: ") and words in err


def test_serve_measures_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeOpenAI()) as url:
        status, out, _ = run(capsys, "bench", "serve", "--base-url", url, "--num-prompts", "2")
    assert status == 0
    assert "Successful requests:                     2         " in out


def test_serve_uses_the_given_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeOpenAI()
    with running(fake) as url:
        line = f"--base-url {url} --num-prompts 1 --endpoint /v1/chat/completions"
        assert run(capsys, "bench", "serve", *line.split())[0] == 0
        assert "messages" in fake.bodies[-1]
        line = f"--base-url {url} --num-prompts 1 --endpoint v1"
        status, _, err = run(capsys, "bench", "serve", *line.split())
    assert status == 1 and "endpoint must begin with a slash" in err


def test_latency_prints_and_writes_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    line = f"--batch-size 2 --input-len 4 --output-len 3 --num-iters 3 --output-json {path}"
    rest = ("--num-iters-warmup", "1", "--disable-log-stats")
    status, out, _ = run(capsys, "bench", "latency", *line.split(), *rest)
    assert status == 0
    assert "Avg latency: " in out and "99% percentile latency: " in out
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["model_id"] == "demo" and len(written["latencies"]) == 3
    assert list(written["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_throughput_prints_and_writes_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(throughput, "measure_limits", lambda *given: Limits(1e9, 1e9))
    path = tmp_path / "out.json"
    line = f"--num-prompts 2 --input-len 4 --output-len 3 --block-size 8 --output-json {path}"
    status, out, _ = run(capsys, "bench", "throughput", *line.split(), "--disable-log-stats")
    assert status == 0
    assert "Total num output tokens:  6" in out
    assert json.loads(path.read_text(encoding="utf-8"))["model_id"] == "demo"


def test_bench_command_imports_no_heavy_packages() -> None:
    heavy = "{'torch', 'numpy', 'h11', 'rich'}"
    code = f"import quire.cli.commands.bench, sys; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_measuring_a_server_does_not_import_torch() -> None:
    code = "import quire.tools.bench.serve, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

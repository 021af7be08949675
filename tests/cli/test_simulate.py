"""`quire simulate` on the command line: `tools/simulate/command.py`, `tools/simulate/build.py`
and `tools/simulate/results.py`."""

import json
from pathlib import Path

import pytest

from quire.cli.main import main

LLAMA = ["simulate", "shape:llama-3.1-8b", "--device", "H100"]


def run(*words: str, folder: Path) -> dict[str, object]:
    path = folder / "out.json"
    assert main([*LLAMA, *words, "--output-json", str(path)]) == 0
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_shared_prefixes_hit_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "24", "--dataset-name", "prefix_repetition"]
    limits = ["--request-rate", "50", "--goodput", "ttft:200", "tpot:50"]
    more = ["--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "9"]
    found = run(*words, *more, *limits, "--replicas", "2", folder=tmp_path)
    engine = found["engine"]
    assert isinstance(engine, dict)
    assert (found["completed"], found["total_output_tokens"]) == (24, 24 * 9)
    assert found["request_goodput"] == found["request_throughput"]
    assert sum(engine["per_replica"]) == 24 and engine["cached"] > 0.3
    message = capsys.readouterr().out
    assert "Mean TTFT (ms):" in message and "Waited for memory (ms):" in message


def test_prefill_and_decode_replicas_are_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "8", "--input-len", "320", "--output-len", "9"]
    roles = ["--prefill-replicas", "1", "--decode-replicas", "2", "--link-gb-per-s", "10"]
    found = run(*words, *roles, "--request-rate", "50", folder=tmp_path)
    assert (found["completed"], found["total_output_tokens"], found["replicas"]) == (8, 72, 3)
    assert "1 prefill and 2 decode replicas" in capsys.readouterr().out
    for wrong, named in (
        (["--prefill-replicas", "1"], "--decode-replicas must be given together"),
        ([*roles, "--replicas", "2"], "without --replicas"),
        ([*roles, "--kv-host-gb", "0"], "set kv_host_gb"),
        ([*roles, "--no-enable-prefix-caching"], "prefix cache"),
        ([*roles, "--kv-disk-dir", "any"], "without a disk; remove kv_disk_dir"),
    ):
        assert main([*LLAMA, *words, *wrong]) == 1
        assert named in capsys.readouterr().err


def test_tensor_parallel_devices_are_faster(tmp_path: Path) -> None:
    words = ["--num-prompts", "6", "--input-len", "300", "--output-len", "5"]
    alone = run(*words, folder=tmp_path)
    four = run(*words, "-tp", "4", folder=tmp_path)
    assert float(str(four["duration"])) < 0.6 * float(str(alone["duration"]))
    assert float(str(four["pool_tokens"])) > 4 * float(str(alone["pool_tokens"]))


def test_trace_is_replayed_at_another_rate(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:17:{i:02}.0000000,{100 + i},{5 + i}" for i in range(10)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    found = run("--trace", str(path), "--request-rate", "20", folder=tmp_path)
    assert (found["completed"], found["total_input_tokens"]) == (10, 1045)
    assert found["request_rate"] == 20 and 0.4 < float(str(found["duration"])) < 0.8


def test_session_continues_after_a_refused_request(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]},
        {"delay": 500, "input_length": 200, "output_length": 4, "hash_ids": [3]},
    ]
    path.write_text("\n".join(json.dumps(line | {"session_id": "a"}) for line in lines))
    roles = ["--prefill-replicas", "1", "--decode-replicas", "1"]
    for more in ([], roles):
        found = run("--trace", str(path), "--max-model-len", "600", *more, folder=tmp_path)
        assert (found["completed"], found["total_input_tokens"]) == (1, 200)
        assert float(str(found["duration"])) > 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "24GB", "--max-model-len", "auto"], "choose a device of B200"),
        (["--trace", "missing.csv"], "cannot be read"),
        (["--kv-store", "dir:x"], "not simulated"),
        (["--agents", "codex", "--trace", "x.csv"], "two workloads"),
        (["--agents", "codex"], "--agents and --num-prompts belong to two workloads"),
        (["--agents", "codex", "--request-rate", "2"], "--agents and --request-rate"),
        (["--kv-disk-dir", "any", "--no-enable-prefix-caching"], "keep enable_prefix_caching on"),
        (["--speculative-config", '{"method": "ngram"}'], "not simulated"),
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size"),
        (["--goodput", "speed:1"], "--goodput knows"),
        (["--plot", "x.png"], "--plot must be a file name ending in .svg, got 'x.png'"),
    ],
)
def test_invalid_options_are_reported(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LLAMA, "--num-prompts", "2", *words]) == 1
    assert message in capsys.readouterr().err


def test_agents_and_tenants_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--agents", "codex", "--tenants", "2"]) == 1
    assert "--agents and --tenants belong to two workloads" in capsys.readouterr().err

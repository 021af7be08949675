"""The instruction set of each format: measured, saved to a file, and chosen by the figures."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from quire.ops.host.native import core
from quire.ops.linear import linear
from quire.ops.weights import formats, kernel_choice
from quire.ops.weights.device_weights import packing
from quire.ops.weights.formats import (
    FORMATS,
    Quantization,
    chosen_variant,
    packed_bytes,
    panel_of,
    timed_formats,
)
from quire.ops.weights.kernel_choice import (
    KernelFile,
    Measurement,
    Speed,
    choose_variant,
    machine_facts,
)
from quire.ops.weights.kernel_timing import FORMAT_S, ROUNDS, fastest, measure_kernels
from quire.ops.weights.pack import pack
from tests.support.kernels.kernel_speeds import keep_figures, own_figures

NAMES = ("portable", "avx2", "avx512", "avx512_bf16")
HERE = formats.variants()
needs_two = pytest.mark.skipif(len(HERE) < 2, reason="this CPU runs one instruction set")

SPEED = Speed(1e10, 1e11)
WANTED = {"bfloat16": ("portable", "avx2"), "int8": ("portable", "avx2")}
FACTS = {"model name": "a CPU", "flags": "avx2 fma", "microcode": "0x1", "quire": "1", "build": "9"}


def speeds(row: float = 1.0, tile: float = 1.0) -> dict[str, Speed]:
    """Return equal speeds, except that avx512's are multiplied by these factors."""
    found = dict.fromkeys(NAMES, SPEED)
    return found | {"avx512": Speed(row * 1e10, tile * 1e11)}


# ---- the rule --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "tile", "wanted"),
    [
        (1.0, 1.0, "avx512_bf16"),
        (1.0, 1.2, "avx512_bf16"),  # 1.095 altogether: may be noise
        (1.0, 1.22, "avx512"),
        (1.0, 2.0, "avx512"),  # as where vdpbf16ps runs at half of the rate of fp32
        (1.25, 1.0, "avx512"),
        (0.6, 2.0, "avx512_bf16"),  # decoding loses what prompts gain
        (0.5, 0.5, "avx512_bf16"),
    ],
)
def test_another_variant_is_chosen_only_if_clearly_faster(
    row: float, tile: float, wanted: str
) -> None:
    assert choose_variant(speeds(row, tile), NAMES) == wanted


def test_fastest_of_several_variants_is_chosen() -> None:
    found = speeds(1.0, 1.5) | {"avx2": Speed(1.2e10, 1.6e11)}
    assert choose_variant(found, NAMES) == "avx2"
    found["avx2"] = found["avx512"]
    assert choose_variant(found, NAMES) == "avx512"  # of equal ones, that with more features
    assert choose_variant({"avx2": SPEED}, NAMES) == NAMES[-1]  # nothing to compare it with


# ---- the clock -------------------------------------------------------------------------------


class Machine:
    """Fake calls that take the given times, on a fake clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now

    def call(self, name: str, times: Iterator[float]) -> Any:
        def run() -> None:
            self.order.append(name)
            self.now += next(times)

        return run


def steadily(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def stolen(seconds: float, nth: int) -> Iterator[float]:
    """Yield times of calls of which only every nth is undisturbed."""
    while True:
        for i in range(nth):
            yield seconds if i == nth - 1 else 9 * seconds


def test_fastest_ignores_noise() -> None:
    machine = Machine()
    calls = [[machine.call("a", stolen(1e-4, 4))], [machine.call("b", steadily(2e-4))]]
    assert fastest(calls, machine.clock) == [[pytest.approx(1e-4)], [pytest.approx(2e-4)]]
    assert machine.order[:4] == ["a", "b", "a", "b"]  # in alternation


def test_slow_candidates_are_dropped_early_and_the_time_is_bounded() -> None:
    machine = Machine()
    calls = [[machine.call("slow", steadily(2e-3))], [machine.call("fast", steadily(1e-4))]]
    assert fastest(calls, machine.clock)[0] == [pytest.approx(2e-3)]
    assert (machine.order.count("slow"), machine.order.count("fast")) == (2, ROUNDS)
    machine = Machine()
    calls = [[machine.call(name, steadily(8e-3))] for name in "ab"]
    fastest(calls, machine.clock)
    assert len(machine.order) == 4 and machine.now < 2 * FORMAT_S


def test_candidate_with_one_slow_shape_is_not_dropped() -> None:
    machine = Machine()
    calls = [
        [machine.call("row", steadily(1e-4)), machine.call("tile", steadily(1.1e-3))],
        [machine.call("row", steadily(1e-4)), machine.call("tile", steadily(1e-4))],
    ]
    fastest(calls, machine.clock)
    assert machine.order.count("row") == 2 * ROUNDS


def test_timed_formats_are_those_that_are_packed() -> None:
    timed = {
        name: (formats.NAMES[number], group) for name, (number, group) in timed_formats().items()
    }
    assert list(timed) == list(FORMATS) and timed["bfloat16"] == ("bfloat16", 1)
    assert timed["int8"] == ("int8", 128) and timed["int4"] == ("int4_multiples", 128)


@needs_two
def test_measurement_of_this_machine_is_plausible() -> None:
    found = measure_kernels(core(), formats.variant_numbers(), timed_formats())
    assert list(found) == list(FORMATS)
    for name, each in found.items():
        assert list(each) == list(HERE)
        assert all(math.isfinite(s.tile_flops) and s.row_bytes_per_s > 0 for s in each.values())
        best = max(speed.tile_flops for speed in each.values())
        assert best > 1.2 * each["portable"].tile_flops, name


# ---- the file --------------------------------------------------------------------------------


class Measurer:
    """Return fixed speeds, and count the calls."""

    def __init__(self, tile_flops: float = 1e11) -> None:
        self.count = 0
        self.speed = Speed(1e10, tile_flops)

    def __call__(self) -> dict[str, dict[str, Speed]]:
        self.count += 1
        return {name: dict.fromkeys(variants, self.speed) for name, variants in WANTED.items()}


def test_machine_is_measured_once(tmp_path: Path) -> None:
    measure, directory = Measurer(), tmp_path / "a/b"
    first = KernelFile(directory, FACTS, WANTED).load_or_measure(measure)
    again = KernelFile(directory, FACTS, WANTED).load_or_measure(measure)
    assert measure.count == 1 and again == first and first.cpu == "a CPU"
    assert [path.suffix for path in directory.iterdir()] == [".json"]
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", FACTS)
def test_another_machine_is_measured_again(tmp_path: Path, name: str) -> None:
    """One fact differs (CPU, microcode, features, version, build) or is not known."""
    measure = Measurer()
    for facts in (FACTS, FACTS | {name: "another"}, {k: v for k, v in FACTS.items() if k != name}):
        KernelFile(tmp_path, facts, WANTED).load_or_measure(measure)
    assert measure.count == 3 and len(list(tmp_path.iterdir())) == 3


def test_other_instruction_sets_have_another_file(tmp_path: Path) -> None:
    paths = {
        KernelFile(tmp_path, FACTS, wanted).path
        for wanted in (WANTED, WANTED | {"int4": ("portable",)}, WANTED | {"int8": ("portable",)})
    }
    assert len(paths) == 3


def saved_file(tmp_path: Path) -> tuple[KernelFile, dict[str, Any]]:
    file = KernelFile(tmp_path, FACTS, WANTED)
    file.load_or_measure(Measurer())
    return file, json.loads(file.path.read_text())


def changed(found: dict[str, Any], **speed: Any) -> bytes:
    found["speeds"]["int8"]["avx2"] |= speed
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: b"",
        lambda found: b"\x00\xff{",
        lambda found: json.dumps(found).encode()[:-20],
        lambda found: b"[" * 60_000,
        lambda found: json.dumps(found).encode() + b" " * (1 << 16),
        lambda found: json.dumps(found | {"machine": "another"}).encode(),
        lambda found: json.dumps(found | {"speeds": {}}).encode(),
        lambda found: json.dumps(found | {"took_s": "long"}).encode(),
        lambda found: changed(found, tile_flops=0.0),
        lambda found: changed(found, tile_flops=-1.0),
        lambda found: changed(found, row_bytes_per_s=1e300),
        lambda found: changed(found, row_bytes_per_s=float("nan")),
        lambda found: changed(found, row_bytes_per_s=None),
        lambda found: json.dumps(found["speeds"]["int8"].pop("avx2") and found).encode(),
    ],
)
def test_invalid_file_is_replaced(tmp_path: Path, damage: Any) -> None:
    file, found = saved_file(tmp_path)
    file.path.write_bytes(damage(found))
    measure = Measurer(3e11)
    got = file.load_or_measure(measure)
    assert measure.count == 1 and got.speeds["int8"]["avx2"].tile_flops == 3e11
    assert file.load_or_measure(measure) == got and measure.count == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_measurement_that_cannot_be_saved_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the directory should be")
    measure = Measurer()
    for _ in range(2):
        got = KernelFile(tmp_path / "taken", FACTS, WANTED).load_or_measure(measure)
        assert got.speeds["int8"]["avx2"] == SPEED
    assert measure.count == 2
    file = KernelFile(tmp_path, FACTS, WANTED)
    file.path.mkdir()
    assert file.load_or_measure(measure).speeds["int8"]["avx2"] == SPEED
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.path.name, "taken"]


def test_concurrent_starts_use_the_same_measurement(tmp_path: Path) -> None:
    """Each measures other figures; all must use the figures in the file."""
    ready, found = Barrier(6), []

    def start(number: int) -> None:
        measurer = Measurer(1e11 * (number + 1))

        def measure() -> dict[str, dict[str, Speed]]:
            ready.wait(30)  # nothing is saved until all have looked for a file
            return measurer()

        found.append(KernelFile(tmp_path, FACTS, WANTED).load_or_measure(measure))

    threads = [Thread(target=start, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6 and all(each == found[0] for each in found)
    assert KernelFile(tmp_path, FACTS, WANTED).load() == found[0]
    assert len(list(tmp_path.iterdir())) == 1


def test_number_of_files_is_limited(tmp_path: Path) -> None:
    for build in range(40):
        KernelFile(tmp_path, FACTS | {"build": str(build)}, WANTED).load_or_measure(Measurer())
    assert len(list(tmp_path.iterdir())) == kernel_choice.MAX_FILES
    assert KernelFile(tmp_path, FACTS | {"build": "39"}, WANTED).load() is not None


def test_machine_facts_come_from_cpuinfo_and_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tmp_path / "core.so"
    build.write_bytes(b"1")
    first = machine_facts(build)
    build.write_bytes(b"22")
    assert machine_facts(build)["build"] != first["build"]
    text = "model name\t: A\nflags\t\t: x y\ncpu MHz\t: 1.5\nmodel name\t: B\nmicrocode : 0x2\n"
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(kernel_choice, "CPUINFO", tmp_path / "cpuinfo")
    found = machine_facts(build)
    assert (found["model name"], found["flags"], found["microcode"]) == ("A", "x y", "0x2")
    assert "cpu MHz" not in found  # it differs at each start
    monkeypatch.setattr(kernel_choice, "CPUINFO", tmp_path / "none")
    assert "flags" not in machine_facts(tmp_path / "no core")


# ---- what is chosen is used ------------------------------------------------------------------


@pytest.fixture
def cache_home(tmp_path: Path) -> Iterator[Path]:
    with own_figures(tmp_path):
        yield tmp_path


@needs_two
def test_each_format_has_its_own_instruction_set(cache_home: Path) -> None:
    other = HERE[-2]
    keep_figures({"bfloat16": other, "int4": HERE[0]})
    assert [chosen_variant(name) for name in FORMATS] == [
        HERE[-1], other, HERE[-1], HERE[-1], HERE[0],
    ]  # fmt: skip
    weight = torch.linspace(-1, 1, 100 * 64).view(100, 64)
    assert pack(weight, None).variant == HERE[-1]
    assert pack(weight.bfloat16(), None).variant == other
    assert pack(weight, Quantization("int8", 32)).variant == HERE[-1]
    assert pack(weight, Quantization("int4", 32)).variant == HERE[0]


@needs_two
def test_planned_bytes_equal_packed_bytes(cache_home: Path) -> None:
    """Panels of instruction sets have different widths; 65 outputs need one more narrow panel."""
    keep_figures({"int8": HERE[0]})
    weight = torch.linspace(-1, 1, 65 * 64).view(65, 64)
    how = packing(torch.float32, weight.device)
    for quantization in (None, Quantization("int8", 32), Quantization("int4", 32)):
        packed = pack(weight, quantization)
        assert how.weight_bytes((65, 64), quantization) == packed.nbytes
    narrow = packed_bytes((65, 64), "float32", Quantization("int8", 32), panel_of(HERE[0]))
    assert how.weight_bytes((65, 64), Quantization("int8", 32)) == narrow


@needs_two
def test_environment_overrides_the_choice(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_figures(dict.fromkeys(FORMATS, HERE[0]))
    weight, x = torch.linspace(-1, 1, 48 * 64).view(48, 64), torch.ones(3, 64)
    assert pack(weight, None).variant == HERE[0]
    monkeypatch.setenv("QUIRE_CPU_VARIANT", HERE[-1])
    assert {chosen_variant(name) for name in FORMATS} == {HERE[-1]}
    assert torch.allclose(linear(x, pack(weight, None)), x @ weight.T, atol=1e-4)


@needs_two
def test_without_a_file_this_machine_is_measured(cache_home: Path) -> None:
    assert chosen_variant("bfloat16") in HERE
    (path,) = (cache_home / "quire/kernels").iterdir()
    found = Measurement.parse(path.read_bytes())
    assert found == formats.measurement() and found.took_s > 0

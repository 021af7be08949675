"""The pages of numbers follow from the result files, and so do the figures of other pages."""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.numbers.__main__ import FOLDER
from benchmarks.numbers.catalogue import HIGHLIGHTS, PAGES
from benchmarks.numbers.page import (
    Table,
    Value,
    filled,
    lines_of,
    pages_of,
    source_of,
    value_of,
)
from benchmarks.result_files import Result, read_all

ROOT = Path(__file__).parents[2]
RESULTS = read_all()
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 250
OF_THE_EVALUATION = {
    "virtual-time/paper.json", "epyc-zen4-2/paper_real.json", "epyc-zen3-2/paper_measured.json",
}  # fmt: skip
TOY = Result(
    "toy", "abc1234", "2026-11-28", {"cpu": "x", "cores": 1}, {"limit_s": 0.5},
    [
        {"engine": "a", "figure": "rate", "best": 1234.5, "is_quick": True},
        {"engine": "a", "figure": "first_s", "best": 0.0625, "runs": [0.1, 0.3, 0.2]},
        {"engine": "b", "figure": "rate", "best": 12.345},
    ],
)  # fmt: skip


def test_pages_equal_the_result_files() -> None:
    for name, text in pages_of(PAGES, HIGHLIGHTS, RESULTS).items():
        assert (FOLDER / name).read_text("utf-8") == text, "run python -m benchmarks.numbers"
        assert len(text.splitlines()) <= MAX_LINES, name


def test_each_result_file_is_on_a_page() -> None:
    sections = [section for page in PAGES for section in page.sections]
    shown = {table.file for section in sections for table in section.tables}
    assert shown | OF_THE_EVALUATION == RESULTS.keys()


def test_commands_name_existing_modules() -> None:
    commands = {section.command for page in PAGES for section in page.sections}
    modules = {name for command in commands for name in re.findall(r"-m ([\w.]+)", command)}
    assert len(modules) > 30
    for name in modules:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    targets = {name for command in commands for name in re.findall(r"^make ([\w-]+)", command)}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{best*1e3:.1f} ms", "62.5 ms"),
        ("{runs} of {runs@min} to {runs@max}", "0.2 of 0.1 to 0.3"),
        ("{best:sig}", "0.0625"),
        ("{engine}: {missing}", ""),
        ("as it is", "as it is"),
    ],
)
def test_cells_are_formatted(template: str, text: str) -> None:
    assert filled(template, TOY.rows[1]) == text
    assert filled("{best:sig}, {is_quick}", TOY.rows[0]) == "1,234, yes"


def test_tables_are_written_by_rows_or_transposed() -> None:
    columns = {"": "{engine}", "best": "{best:.1f}", "limit": "{settings.limit_s}"}
    lines = lines_of(Table("m/toy.json", columns, {"figure": "rate"}), TOY)
    assert lines[:4] == [
        "|  | best | limit |", "| --- | --- | --- |", "| a | 1234.5 | 0.5 |", "| b | 12.3 | 0.5 |"
    ]  # fmt: skip
    link = "[toy.json](../../benchmarks/results/m/toy.json)"
    assert source_of("m/toy.json", TOY) == [f"{link}, m, 2026-11-28, abc1234", ""]
    headings = {"first_s": "first", "rate": "tok/s"}
    turned = Table("m/toy.json", {"": "{engine}"}, {}, "figure", "{best:sig}", headings)
    assert lines_of(turned, TOY)[:4] == [
        "|  | first | tok/s |", "| --- | --- | --- |", "| a | 0.0625 | 1,234 |", "| b |  | 12.3 |"
    ]  # fmt: skip


def test_wrong_catalogue_entries_are_refused() -> None:
    with pytest.raises(ValueError, match=r"m/toy\.json has no row with \{'engine': 'c'\}"):
        lines_of(Table("m/toy.json", {"": "{engine}"}, {"engine": "c"}), TOY)
    with pytest.raises(ValueError, match="a column of .* is empty"):
        lines_of(Table("m/toy.json", {"": "{engine}", "x": "{nothing}"}), TOY)


def test_value_comes_from_one_row() -> None:
    results = {"m/toy.json": TOY}
    assert value_of(Value("m/toy.json", "{best:.1f}", {"engine": "b"}), results) == "12.3"
    with pytest.raises(ValueError, match="has 2 rows with"):
        value_of(Value("m/toy.json", "{best:.1f}", {"engine": "a"}), results)


def only(file: str, field: str, **values: Any) -> Any:
    """Return a field of the one row that has these values."""
    (row,) = RESULTS[file].where(**values)
    return row[field]


def best(file: str, figure: str, spec: str, *engines: str) -> str:
    """Return the best of engines on the EPYC of family 25, as the README lists them."""
    found = (only(f"epyc-zen4-2/{file}.json", "best", engine=e, figure=figure) for e in engines)
    return ", ".join(format(each, spec) for each in found)


OURS = "quire bf16", "quire int8", "quire int4"
OURS_INT4_HEAD = *OURS[:2], "quire int4 head int4"
OPENVINO = "openvino fp16", "openvino int8", "openvino int4"
LLAMA = "llama.cpp bf16", "llama.cpp q8_0", "llama.cpp q4_0"
VLLM = "vllm bf16", "vllm int8", "vllm int4"
# For each table line: first cell, file, figure, format, our engines, and the best other engines.
TABLE: list[tuple[str, str, str, str, tuple[str, ...], Callable[[Any], str]]] = [
    ("16 requests at once, 128 in / 64 out: bf16, int8, int4", "cpu", "batch_rate", ".0f", OURS,
     lambda of: f"{of(*OPENVINO)} (OpenVINO)"),
    ("16 requests that share 512 of 544 prompt tokens, never seen before", "cpu_others",
     "cold_rate", ".0f", OURS, lambda of: f"{of(*VLLM)} (vLLM)"),
    ("one request", "cpu", "decode_rate", ".1f", OURS_INT4_HEAD,
     lambda of: f"{of(*LLAMA)} (llama.cpp)"),
    ("tokens/s of a prompt of 1,024", "cpu", "prefill_rate", ".0f", OURS,
     lambda of: f"{of(OPENVINO[0])} (OpenVINO), {of(VLLM[1])} (vLLM),"
                f" {of(OPENVINO[2])} (OpenVINO)"),
    ("seconds to the first token of 128", "cpu", "ttft_s", ".3f", OURS_INT4_HEAD,
     lambda of: f"{of(OPENVINO[0])} (OpenVINO), {of(*VLLM[1:])} (vLLM)"),
    ("seconds from the command to a first token", "cpu_others", "start_s", ".2f", OURS,
     lambda of: f"{of(*LLAMA)} (llama.cpp)"),
]  # fmt: skip


def test_readme_table_equals_the_results() -> None:
    found = re.search(r"\| \| quire \| best other \|\n\|[-|]+\n((?:\|.*\n)+)", README)
    assert found
    expected = [
        f"| {first} | {best(file, figure, spec, *ours)} |"
        f" {others(lambda *e, f=(file, figure, spec): best(*f, *e))} |"
        for first, file, figure, spec, ours, others in TABLE
    ]
    assert found[1].splitlines() == expected


def test_readme_names_the_best_other_engine() -> None:
    """The last cell of each line shows the best other engine with that format."""
    for _, file, figure, spec, _, others in TABLE:
        rows = RESULTS[f"epyc-zen4-2/{file}.json"].where(figure=figure)
        named = re.findall(r"[\d.]+", others(lambda *e, f=(file, figure, spec): best(*f, *e)))
        kinds = {"bf16": 0, "fp16": 0, "int8": 1, "q8_0": 1, "int4": 2, "q4_0": 2}
        for row in rows:
            name, kind = row["engine"].split()[:2]
            if name != "quire":
                bound = float(named[kinds[kind]])
                value = float(format(row["best"], spec))
                assert value >= bound if figure.endswith("_s") else value <= bound, row


def test_readme_sentences_equal_the_results() -> None:
    text = " ".join(README.split())
    step = only("epyc-zen5-2/steps.json", "ms.schedule + update.median",
                load="steady", rows=1024, spread=True, prefix_caching=True)  # fmt: skip
    assert f"A scheduler step of 1,024 decoding sequences takes {step:.2f} ms" in text
    live = only("epyc-zen5-2/live_slots.json", "live_share",
                workload="ShareGPT-like", block_size=16)  # fmt: skip
    assert f"{live * 100:.1f} % of the slots hold live tokens" in text
    seconds = only("epyc-zen4-2/start.json", "seconds", command="quire generate, demo model")
    assert f"first token comes {median(seconds):.1f} s after the command" in text
    decode = {"what": "decode", "model": "llama-3.1-8b", "context": 512}
    one, many = (only("h200/gpu_engine.json", "mean_ms", rows=n, **decode) for n in (1, 64))
    assert f"token of an 8B model takes {one:.1f} ms, a step of 64 rows takes {many:.1f} ms" in text


def test_gpu_md_sentences_equal_the_results() -> None:
    text = " ".join((ROOT / "docs" / "inside" / "gpu.md").read_text(encoding="utf-8").split())
    decode = {"what": "decode", "model": "llama-3.1-8b", "context": 512}
    one, many = (only("h200/gpu_engine.json", "mean_ms", rows=n, **decode) for n in (1, 64))
    assert f"a step of Llama-3.1-8B takes {one:.1f} ms for one row and {many:.1f} ms for 64" in text


def test_cpu_md_sentences_about_tiles_equal_the_results() -> None:
    text = " ".join((ROOT / "docs" / "inside" / "cpu.md").read_text(encoding="utf-8").split())
    many = RESULTS["xeon-amx-16/linear.json"].where(rows=1024)
    rates = {(row["format"], row["shape"], row["variant"]): row["gop_per_s"] for row in many}
    times = [
        rates[format, shape, "amx"] / rates[format, shape, "avx512_bf16"]
        for format in ("bfloat16", "int8")
        for shape in ("gate_up", "8b_down")
    ]
    assert f"products are {min(times):.1f} to {max(times):.1f} times as fast as without" in text
    chunk = {"case": "chunk, 256 after 1792", "threads": 12}
    dots, tiles = (
        only("xeon-amx-12/attention.json", "layer_us", variant=variant, **chunk)
        for variant in ("avx512_bf16", "amx")
    )
    assert f"behind 1,792 is {dots / tiles:.1f} times as fast as with dots" in text

"""Counts of ARM instructions: the table, and an emulated product in a slow test."""

from pathlib import Path

import pytest

from benchmarks.kernels.instructions import COMPILER, EMULATOR, VARIANTS, build, row_of, table
from tests.support.kernels.cpp_checks import tool


def test_minimum_is_one_multiplication_per_vector() -> None:
    dotprod, i8mm = VARIANTS[1], VARIANTS[2]
    assert [i8mm.minimum(name) for name in ("float16", "bfloat16", "int4")] == [250, 62.5, 31.25]
    assert dotprod.minimum("bfloat16") == 250


def test_table_has_a_column_for_each_number_of_rows() -> None:
    figures = {"variant": "neon", "format": "int8", "min_per_1000": 125.0}
    rows = [
        figures | {"rows": 1, "instructions_per_1000": 500.0, "share": 0.25},
        figures | {"rows": 16, "instructions_per_1000": 250.0, "share": 0.5},
    ]
    head, line = table(rows)
    assert head.split() == ["variant", "format", "min", "1", "16"]
    assert line.split() == ["neon", "int8", "125", "500", "(25%)", "250", "(50%)"]


@pytest.mark.slow  # compiles the core's products for ARM
def test_more_rows_take_fewer_instructions_per_row(tmp_path: Path) -> None:
    tool(COMPILER, "g++-aarch64-linux-gnu")
    tool(EMULATOR, "qemu-user")
    built = build(tmp_path)
    for variant in VARIANTS:
        for format in ("bfloat16", "int8"):
            one, many = (row_of(variant, format, rows, built) for rows in (1, 16))
            assert 0 < many["share"] < 1.01
            assert many["instructions_per_1000"] < one["instructions_per_1000"], variant

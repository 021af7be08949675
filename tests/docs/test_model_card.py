"""The figures of the demo model's card equal demo_model/accuracy.json and its weights."""

import json
import math
import re

import pytest
from safetensors import safe_open

from tests.support.code_blocks import ROOT

CARD = (ROOT / "demo_model" / "model_card.md").read_text("utf-8")
ACCURACY = json.loads((ROOT / "demo_model" / "accuracy.json").read_text("utf-8"))
ROW = re.compile(r"^\| ([a-z ]+) \| (\d+) \| ([\d.]+) % \| .*? \| (.*) \|$", re.MULTILINE)
PART = re.compile(r"([^;]+?) ([\d.]+) % of (\d+)")
ROUNDING = 0.0501  # points of a figure with one place


def test_accuracy_table_equals_the_measurement() -> None:
    rows = {match[1]: match for match in ROW.finditer(CARD)}
    assert rows.keys() == ACCURACY.keys()
    for name, measured in ACCURACY.items():
        row = rows[name]
        assert int(row[2]) == measured["items"]
        assert float(row[3]) == pytest.approx(100 * measured["accuracy"], abs=ROUNDING)
        for part, share, num in PART.findall(row[4]):
            part = part.strip()
            assert float(share) == pytest.approx(100 * measured["parts"][part], abs=ROUNDING)
            assert int(num) == measured["part_items"][part]


def test_number_of_parameters_equals_the_weights() -> None:
    with safe_open(ROOT / "src" / "quire" / "demo" / "model.safetensors", "numpy") as file:
        num = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert f"| Parameters | {num:,} |" in CARD

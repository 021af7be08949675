"""The section of docs/use/model-table.md about all text types of transformers is true. See
`type_survey.py`."""

from typing import Any

import pytest

from tests.models.type_survey import UNTRIED, all_types, outcome, read_results

# transformers' class, values that decide sizes, and an encoder.
QUICK = ("starcoder2", "jetmoe", "bart")


def cases() -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in all_types()
    ]


@pytest.mark.parametrize("model_type", cases())
def test_a_type_does_what_the_page_says(model_type: str) -> None:
    said = read_results()[model_type]
    assert outcome(model_type) == said, "run python -m tests.models.type_survey"


def test_the_page_lists_all_types() -> None:
    results = read_results()
    assert sorted(results) == all_types(), "run python -m tests.models.type_survey"
    assert not any("meta" in found for found in results.values()), "no error of torch's own"
    assert sum(found == UNTRIED for found in results.values()) < len(results) / 10

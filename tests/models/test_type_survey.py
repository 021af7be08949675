"""docs/use/model-table.md is true for all text types of transformers. See `type_survey.py`."""

from typing import Any

import pytest

from tests.models.type_survey import UNTRIED, all_types, outcome, read_results

# One runs by transformers' class, one has sizes that depend on values, and one is an encoder.
QUICK = ("starcoder2", "jetmoe", "bart")


def cases() -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in all_types()
    ]


@pytest.mark.parametrize("model_type", cases())
def test_each_type_matches_the_page(model_type: str) -> None:
    stated = read_results()[model_type]
    assert outcome(model_type) == stated, "run python -m tests.models.type_survey"


def test_the_page_lists_all_types() -> None:
    results = read_results()
    assert sorted(results) == all_types(), "run python -m tests.models.type_survey"
    assert not any("meta" in found for found in results.values()), "no result is an error of torch"
    assert sum(found == UNTRIED for found in results.values()) < len(results) / 10

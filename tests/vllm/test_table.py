"""The page of vLLM's examples shows the scripts as they are. Covers `tests/vllm/table.py`."""

import pytest

from tests.vllm.table import PAGE, SCRIPTS, page


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text) == text, "run `make migrating`"
    for script in SCRIPTS:
        assert f"examples/vllm/{script.path.name}" in text


def test_a_page_needs_its_marks() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        page("# Title")

"""Cores that tests start are forks of a process that has imported torch (tests/forks.py)."""

from collections.abc import Iterator

import pytest

from tests.forks import forked_children


@pytest.fixture(autouse=True, scope="module")
def forked_cores() -> Iterator[None]:
    with forked_children():
        yield

"""Start the cores of tests as forks (tests/support/processes/forks.py)."""

from collections.abc import Iterator

import pytest

from tests.support.processes.forks import forked_children


@pytest.fixture(autouse=True, scope="module")
def forked_cores() -> Iterator[None]:
    with forked_children():
        yield

"""Start the ranks of tests as forks (tests/support/processes/forks.py)."""

from collections.abc import Iterator

import pytest

from tests.support.processes.forks import SiteForkedPopen, forked_children


@pytest.fixture
def executed_ranks() -> None:
    """Start ranks as the engine starts them, without forking."""


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    if "executed_ranks" in request.fixturenames:
        yield
        return
    with forked_children(SiteForkedPopen):
        yield

"""Ranks of this process are forks of one that has imported all that a rank imports."""

from collections.abc import Iterator

import pytest

import quire.engine.wire.spawn
from tests.support.processes.forked import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote("quire.engine.ranks.rank_main")
    yield made
    made.close()


@pytest.fixture
def executed_ranks() -> None:
    """Requested by tests that start ranks as the engine starts them."""


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "executed_ranks" not in request.fixturenames:
        zygote = request.getfixturevalue("zygote")
        monkeypatch.setattr(quire.engine.wire.spawn, "subprocess", zygote)

"""The API's engine and contexts, also for batches; polling loops poll often."""

import pytest

from quire.serve.batches import batch_job, batches
from tests.serve.api.conftest import engine, make_context  # noqa: F401


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "POLL_S", 0.02)
    monkeypatch.setattr(batch_job, "TICK_S", 0.02)

"""max_num_queued_reqs bounds the waiting requests; local and remote clients get EngineBusy."""

import asyncio
from pathlib import Path

import pytest

from quire.base.clock import MonotonicClock
from quire.base.errors import EngineBusy, RequestError
from quire.base.settings.config import config_from_flat
from quire.engine.attachments.queue_limit import QueueLimit
from quire.engine.client.remote import RemoteClient
from quire.engine.loop.core import EngineCore
from quire.engine.start.build import build_core
from quire.models.checkpoint.source import resolve_model
from tests.engine.client.test_remote import SETTINGS, Served, request, token_ids
from tests.support.engine.attachments import attached
from tests.support.models.reference_checkpoints import checkpoint

ROWS, QUEUED = 2, 3


@pytest.fixture
def core() -> EngineCore:
    """A core with two rows and room for three waiting requests."""
    settings = SETTINGS | {"max_num_seqs": ROWS, "max_num_queued_reqs": QUEUED}
    config = config_from_flat(model=str(checkpoint("llama")), **settings)
    return build_core(config, resolve_model(config.model.model), MonotonicClock()).core


def test_burst_fills_the_free_rows_and_the_queue(core: EngineCore) -> None:
    for i in range(ROWS + QUEUED):
        core.add(request(f"{i}"))
    with pytest.raises(EngineBusy, match="are waiting already .5, and max_num_queued_reqs is 3"):
        core.add(request("one more"))
    core.step()
    assert core.scheduler.num_waiting == QUEUED
    with pytest.raises(EngineBusy):
        core.add(request("still too many"))
    while core.scheduler.num_waiting == QUEUED:
        core.step()
    while core.scheduler.num_waiting < QUEUED:
        core.add(request(f"more {core.scheduler.num_waiting}"))
    with pytest.raises(EngineBusy):
        core.add(request("again too many"))


def test_free_rows_admit_nothing_while_the_pool_is_full(core: EngineCore) -> None:
    """Blocks are short, not rows, so new requests would queue behind the waiting ones."""
    pool = core.scheduler.memory.kv.pools[0]
    taken = [pool.allocate() for _ in range(pool.num_free)]
    core.add(request("first"))
    assert core.plan() is None
    for i in range(QUEUED - 1):
        core.add(request(f"{i}"))
    assert core.scheduler.num_free_rows == ROWS
    with pytest.raises(EngineBusy):
        core.add(request("too many"))
    for block_id in taken:
        pool.release(block_id)


def test_queue_is_unbounded_without_a_limit(core: EngineCore) -> None:
    limit = attached(core, QueueLimit)
    assert limit is not None
    core.detach(limit)
    for i in range(100):
        core.add(request(f"{i}"))
    assert core.scheduler.num_waiting == 100


def test_remote_client_gets_engine_busy_and_may_retry(core: EngineCore, tmp_path: Path) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        calls = [token_ids(client.generate(request(f"{i}", max_tokens=30))) for i in range(20)]
        got = await asyncio.gather(*calls, return_exceptions=True)
        refused = [error for error in got if isinstance(error, BaseException)]
        assert refused and all(isinstance(error, EngineBusy) for error in refused)
        assert sum(isinstance(tokens, list) for tokens in got) >= ROWS
        assert isinstance(refused[0], RequestError)
        again = await token_ids(client.generate(request("later", max_tokens=3)))
        assert len(again) == 3
        assert client.num_unfinished == 0
        await client.close()

    served = Served(tmp_path, core)
    try:
        asyncio.run(run())
    finally:
        served.stop()

"""Several cores behind sockets, and one client that chooses: `CoreServer`s run in threads."""

import asyncio
import re
import socket
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.base.clock import MonotonicClock
from quire.base.errors import ConfigError, EngineDead, RequestError
from quire.base.messages import Ready
from quire.base.settings.config import config_from_flat, flat_settings
from quire.engine.client.async_client import pin
from quire.engine.client.fleet import FleetClient, client_of, difference
from quire.engine.client.remote import RemoteClient
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.heartbeat import Heartbeat, HeartbeatReader
from quire.engine.observability.merged_metrics import merged
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.observability.timeline import Timelines
from quire.engine.start.build import build_core
from quire.engine.wire.core_choice import weight
from quire.engine.wire.core_server import CoreReports, CoreServer
from quire.models.checkpoint.source import resolve_model
from tests.engine.client.test_remote import (
    MAX_LEN,
    PROMPT,
    SETTINGS,
    request,
    token_ids,
    until_idle,
)
from tests.support.models.reference_checkpoints import checkpoint, reference_tokens

SIZE = 4
LONG = [i % 90 + 3 for i in range(40)]


class Served:
    """A core that serves in a thread, until `stop`."""

    def __init__(self, home: Path, number: int, max_logprobs: int = 20) -> None:
        home.mkdir(exist_ok=True)
        config = config_from_flat(model=str(checkpoint("llama")), block_size=SIZE, **SETTINGS)
        source = resolve_model(config.model.model)
        built = build_core(config, source, MonotonicClock())
        self.core, self.path, self.home = built.core, home / "core.sock", home
        metrics, timelines = EngineMetrics(4, MAX_LEN, True), Timelines.of(built.core.view(), [])
        self.core.subscribe(metrics)
        self.core.subscribe(timelines)
        text = Exposition(metrics, self.core.view, "tiny", config.cache, number).text
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(8)
        settings = flat_settings(built.config)
        vocab_size = self.core.limits.vocab_size
        ready = Ready(0, vocab_size, MAX_LEN - number, max_logprobs, 4, settings, "memory")
        (home / "heartbeat").unlink(missing_ok=True)
        reports = CoreReports(text, None, Heartbeat(home / "heartbeat", 1.0), timelines.text)
        self.server = CoreServer(self.core, listener, ready, reports, MonotonicClock())
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    @property
    def load(self) -> int:
        return HeartbeatReader(self.home / "heartbeat").load().tokens

    def stop(self) -> None:
        self.server.stop()
        self.thread.join()
        self.core.close()


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[list[Served]]:
    made = [Served(tmp_path / str(number), number) for number in range(2)]
    yield made
    for core in made:
        core.stop()


def with_client(cores: list[Served], test: Any) -> None:
    """Run a test with a client of all cores."""

    async def run() -> None:
        client = client_of([core.path for core in cores], None)
        assert isinstance(client, FleetClient)
        client.start()
        try:
            await client.wait_until_ready()
            await test(client)
        finally:
            await client.close()

    asyncio.run(run())


def test_fleet_answers_like_one_core_and_shares_the_work(cores: list[Served]) -> None:
    prompts = [[number + 3, *PROMPT] for number in range(6)]
    expected = [reference_tokens(checkpoint("llama"), prompt, 12) for prompt in prompts]

    async def test(client: FleetClient) -> None:
        assert client.ready.max_model_len == MAX_LEN - 1, "the smallest limit of all cores"
        waiting: list[Coroutine[Any, Any, list[int]]] = [
            token_ids(client.generate(request(str(number), prompt)))
            for number, prompt in enumerate(prompts)
        ]
        assert await asyncio.gather(*waiting) == expected
        text = await client.metrics()
        done = re.findall(r'generation_tokens_total{engine="(\d)",model_name="tiny"} (\S+)', text)
        assert done == [("0", "36.0"), ("1", "36.0")]
        for core in cores:
            await until_idle(core.core)
            assert core.load == 0
        assert client.num_unfinished == 0

    with_client(cores, test)


def test_conversation_gets_the_prefix_hits_of_a_single_core(cores: list[Served]) -> None:
    async def hits(client: FleetClient | RemoteClient, salt: str) -> list[int]:
        found, prompt = [], LONG[:20]
        for turn in range(4):
            sent = msgspec.structs.replace(request(f"{salt} {turn}", prompt), cache_salt=salt)
            outputs = [output async for output in client.generate(sent)]
            found.append(outputs[-1].num_cached_tokens or 0)
            answer = [token for output in outputs for token in output.outputs[0].token_ids]
            prompt = [*prompt, *answer, 5, 6]
        return found

    async def test(client: FleetClient) -> None:
        one = await RemoteClient.connect(cores[0].path, None)
        expected = await hits(one, "alone")
        assert expected[0] == 0 and all(np.diff(expected) > 0)
        several = await asyncio.gather(*(hits(client, salt) for salt in ("a", "b")))
        assert several == [expected, expected]
        await one.close()

    with_client(cores, test)


def test_request_may_choose_its_core(cores: list[Served]) -> None:
    async def test(client: FleetClient) -> None:
        for name in range(3):
            sent = msgspec.structs.replace(request(str(name)), core_id=1)
            await token_ids(client.generate(sent))
        assert (
            'generation_tokens_total{engine="1",model_name="tiny"} 36.0' in await client.metrics()
        )
        with pytest.raises(RequestError, match="there are 2 cores, 0 to 1"):
            await token_ids(client.generate(msgspec.structs.replace(request("x"), core_id=2)))
        one = RemoteClient(cores[0].path, None)
        with pytest.raises(RequestError, match="there is one engine, 0"):
            one.check(msgspec.structs.replace(request("x"), core_id=1))

    with_client(cores, test)


def test_aborts_pieces_and_timelines_reach_the_requests_core(cores: list[Served]) -> None:
    async def test(client: FleetClient) -> None:
        gone = [client.generate(request(str(number), max_tokens=80)) for number in range(4)]
        for outputs in gone:
            await anext(outputs)
        assert all(core.load > 0 for core in cores)
        client.abort("0")
        client.fail("1", RuntimeError("of the reader"))
        await token_ids(gone[0])
        with pytest.raises(RuntimeError, match="of the reader"):
            await token_ids(gone[1])
        for outputs in gone[2:]:
            await outputs.aclose()  # type: ignore[attr-defined]
        for core in cores:
            await until_idle(core.core)
        opened = msgspec.structs.replace(request("open", LONG[:9]), is_open=True)
        reading = asyncio.create_task(token_ids(client.generate(opened)))
        await asyncio.sleep(0)
        client.append("open", LONG[9:20], is_last=True)
        assert await reading == reference_tokens(checkpoint("llama"), LONG[:20], 12)
        with pytest.raises(RequestError, match="is open"):
            client.append("open", [5])
        assert '"open"' in await client.timeline("open")
        assert await client.timeline("nobody") == ""

    with_client(cores, test)


def test_live_frame_is_of_the_given_core(cores: list[Served]) -> None:
    async def test(client: FleetClient) -> None:
        outputs = client.generate(
            msgspec.structs.replace(request("mine", max_tokens=60), core_id=1)
        )
        await anext(outputs)
        ids = [[row.id for row in (await client.live(core)).state.running] for core in (0, 1)]
        assert ids == [[], ["mine"]]
        with pytest.raises(RequestError, match="data_parallel_rank=2"):
            await client.live(2)
        await outputs.aclose()  # type: ignore[attr-defined]

    with_client(cores, test)


def test_pins_and_resets_apply_to_all_cores(cores: list[Served]) -> None:
    def pinning(name: str) -> Any:
        return msgspec.structs.replace(request(name, LONG), pin_s=0.0)

    async def hits(client: FleetClient, core: int) -> int:
        sent = msgspec.structs.replace(request(f"on {core}", [*LONG, 5, 6]), core_id=core)
        return [o async for o in client.generate(sent)][-1].num_cached_tokens or 0

    async def test(client: FleetClient) -> None:
        pinned = await pin(client, pinning("p"))
        [listed] = await client.prefixes()
        assert listed.id == pinned.id == "p" and listed.is_ready and listed.num_blocks == 20
        assert [await hits(client, core) for core in (0, 1)] == [len(LONG)] * 2
        assert (await client.prefixes())[0].num_hits == 2
        with pytest.raises(RequestError):
            await pin(client, msgspec.structs.replace(pinning("q"), pin_s=-1.0))
        assert await client.unpin("p") and not await client.unpin("p")
        assert await client.prefixes() == []
        await client.reset_prefix_cache()
        assert [await hits(client, core) for core in (0, 1)] == [0, 0]
        names = {core.core.scheduler.memory.names.fingerprint for core in cores}
        assert len(names) == 1, "the cores still share blocks through stores"

    with_client(cores, test)


def test_dead_core_fails_its_requests_and_a_new_one_replaces_it(
    cores: list[Served], tmp_path: Path
) -> None:
    async def test(client: FleetClient) -> None:
        await token_ids(client.generate(msgspec.structs.replace(request("x", LONG), core_id=0)))
        open_ones = [client.generate(request(str(n), [n + 3], max_tokens=80)) for n in range(2)]
        for outputs in open_ones:
            await anext(outputs)
        await asyncio.to_thread(cores[0].stop)
        ends = await asyncio.gather(*map(token_ids, open_ones), return_exceptions=True)
        assert sum(isinstance(end, EngineDead) for end in ends) == 1
        assert client.is_alive
        await token_ids(client.generate(request("y", LONG)))  # the other core takes it
        with pytest.raises(EngineDead, match="core 0 of 2"):
            await token_ids(client.generate(msgspec.structs.replace(request("z"), core_id=0)))
        assert 'engine="0"' not in await client.metrics()
        cores[0] = await asyncio.to_thread(Served, tmp_path / "0", 0)
        while len(client._usable()) < 2:
            await asyncio.sleep(0.01)
        again = [o async for o in client.generate(request("again", LONG))]
        assert (again[-1].num_cached_tokens or 0) > 0, "a prefix hit on the surviving core"
        assert 'engine="0"' in await client.metrics()

    # A client gives up without a listener; a real supervisor keeps the socket.

    monkey = pytest.MonkeyPatch()
    monkey.setattr("quire.engine.client.remote.NO_SOCKET", ())
    monkey.setattr("quire.engine.client.remote.AGAIN_S", 0.02)
    try:
        with_client(cores, test)
    finally:
        monkey.undo()


def test_cores_with_different_limits_are_rejected(tmp_path: Path) -> None:
    cores = [Served(tmp_path / str(number), 0, 20 - number) for number in range(2)]
    try:
        with pytest.raises(ConfigError, match=r"core 1 differs from.*max_logprobs: 20 and 19"):
            with_client(cores, lambda _: asyncio.sleep(0))
    finally:
        for core in cores:
            core.stop()


def test_settings_of_a_single_core_are_no_difference() -> None:
    one = Ready(0, 97, 96, 20, 4, {"model": "a", "record": "x/0", "max_model_len": 96}, "m")
    own = {"model": "a", "record": "x/1", "max_model_len": 90}
    assert difference(one, msgspec.structs.replace(one, settings=own, client_id=5)) == ""
    assert "model: 'a' and 'b'" in difference(
        one, msgspec.structs.replace(one, settings=own | {"model": "b"})
    )


def test_choice_of_a_core_counts_the_load_of_other_clients(cores: list[Served]) -> None:
    async def test(client: FleetClient) -> None:
        other = await RemoteClient.connect(cores[0].path, None)
        busy = [other.generate(request(str(n), LONG, max_tokens=50)) for n in range(3)]
        for outputs in busy:
            await anext(outputs)
        assert cores[0].load == 3 * weight(request("", LONG))
        for number in range(2):
            await token_ids(client.generate(request(str(number), [number + 3])))
        text = await client.metrics()
        assert (
            'request_success_total{engine="1",finished_reason="length",model_name="tiny"} 2' in text
        )
        for outputs in busy:
            await outputs.aclose()  # type: ignore[attr-defined]
        await other.close()

    with_client(cores, test)


def test_merged_metrics_have_one_header_per_family() -> None:
    def text(value: int, more: str = "") -> str:
        return (
            f'# HELP a x {{y}} z\n# TYPE a gauge\na{{engine="{value}"}} {value}\n{more}'
            f"# HELP process_b c\n# TYPE process_b gauge\nprocess_b {value}\n"
        )

    extra = "# HELP c d\n# TYPE c counter\nc_total 5\nc_created 6\n"
    assert merged({0: text(0), 1: text(1, extra)}) == (
        '# HELP a x {y} z\n# TYPE a gauge\na{engine="0"} 0\na{engine="1"} 1\n'
        '# HELP process_b c\n# TYPE process_b gauge\nprocess_b{engine="0"} 0\n'
        'process_b{engine="1"} 1\n# HELP c d\n# TYPE c counter\nc_total{engine="1"} 5\n'
        'c_created{engine="1"} 6\n'
    )


def test_one_core_gets_a_plain_client(tmp_path: Path) -> None:
    assert isinstance(client_of([tmp_path], None), RemoteClient)

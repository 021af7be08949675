"""A core behind its socket: `CoreServer` runs in a thread, its clients are `RemoteClient`s.

Covers `engine/client/core_questions.py`.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest

from quire.base.clock import MonotonicClock
from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, EngineBusy, EngineDead, RequestError
from quire.base.messages import Ready, Request
from quire.base.requests.media_items import MediaItem
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import config_from_flat
from quire.engine.client import remote
from quire.engine.client.remote import RemoteClient
from quire.engine.loop.core import EngineCore
from quire.engine.start.build import build_core
from quire.engine.wire.core_server import CoreReports, CoreServer, Handlers
from quire.engine.wire.wire import core_codec
from quire.models.checkpoint.source import resolve_model
from tests.support.cases import slow_but
from tests.support.models.reference_checkpoints import checkpoint, reference_tokens
from tests.support.render.tiny_tokenizers import tokenizer

MAX_LEN = 96
SETTINGS = {
    "dtype": "float64",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 4,
    "disable_log_stats": True,
}
PROMPT = [5, 17, 3, 60, 44, 8]


class Served:
    """A core that serves in a thread, until `stop`."""

    def __init__(
        self,
        folder: Path,
        core: EngineCore | None = None,
        depth: int = 1,
        handlers: Handlers = MappingProxyType({}),
    ) -> None:
        settings = SETTINGS | {"pipeline_depth": depth}
        config = config_from_flat(model=str(checkpoint("llama")), **settings)
        source = resolve_model(config.model.model)
        self.core = core or build_core(config, source, MonotonicClock()).core
        self.path = folder / "core.sock"
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(8)
        ready = Ready(0, self.core.limits.vocab_size, MAX_LEN, 20, 4, {"model": "tiny"}, "memory")
        reports = CoreReports(lambda: "# metrics\n")
        self.server = CoreServer(self.core, listener, ready, reports, MonotonicClock(), handlers)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def stop(self) -> None:
        self.server.stop()
        self.thread.join()


@pytest.fixture(params=slow_but((1, 2, 3), 2), ids=["depth 1", "depth 2", "depth 3"])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    server = Served(tmp_path, depth=request.param)
    yield server
    server.stop()
    server.core.close()


def request(
    name: str, prompt: list[int] = PROMPT, max_tokens: int = 12, kind: str = "DELTA"
) -> Request:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind[kind],
    )
    return Request(name, prompt, params, seed=1)


async def token_ids(outputs: AsyncIterator[RequestOutput]) -> list[int]:
    return [token async for output in outputs for token in output.outputs[0].token_ids]


async def until_idle(core: EngineCore) -> None:
    """Wait until the core has no work; the test's timeout is the limit."""
    while core.has_work:
        await asyncio.sleep(0.001)


def test_live_frame_shows_running_requests_and_their_blocks(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        outputs = client.generate(request("mine", max_tokens=60))
        await anext(outputs)
        frame = await client.live()
        assert [row.id for row in frame.state.running] == ["mine"]
        [group] = frame.state.groups
        assert group.sharers.sum() == frame.state.running[0].num_blocks > 0
        with pytest.raises(RequestError, match="data_parallel_rank=1"):
            await client.live(1)
        await outputs.aclose()
        await client.close()

    asyncio.run(run())


def test_client_refuses_requests_while_the_core_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused request sends nothing, not even an abort."""
    monkeypatch.setattr(remote, "MAX_UNSENT_BYTES", 100_000)
    ready = Ready(0, 97, 1 << 20, 20, 4, {"model": "tiny"}, "memory")

    held: list[object] = []  # keeps the connection, which nothing reads, alive

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.extend([writer, asyncio.current_task()])
        writer.write(core_codec().encode(ready))
        await asyncio.Event().wait()

    async def run() -> None:
        server = await asyncio.start_unix_server(greet, tmp_path / "core.sock")
        client = await RemoteClient.connect(tmp_path / "core.sock", None)
        assert client._writer is not None
        transport, waiting = client._writer.transport, []
        while transport.get_write_buffer_size() <= 100_000:
            assert len(waiting) < 1000, "the client buffers without a bound"
            prompt = [1] * 50_000
            waiting.append(
                asyncio.create_task(token_ids(client.generate(request(f"r{len(waiting)}", prompt))))
            )
            await asyncio.sleep(0)
        num_bytes = transport.get_write_buffer_size()
        for _ in range(20):
            with pytest.raises(EngineBusy, match="has not yet accepted"):
                await token_ids(client.generate(request("refused")))
        assert transport.get_write_buffer_size() == num_bytes
        assert client.num_unfinished == len(waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await client.close()
        server.close()

    asyncio.run(run())


def test_the_pixels_of_open_requests_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model takes no images, so the core rejects requests whose pixels are within the bound."""
    monkeypatch.setattr(remote, "MAX_MEDIA_BYTES", 60)
    monkeypatch.setattr(remote, "MAX_OPEN_MEDIA_BYTES", 100)

    def imaged(name: str, num_bytes: int) -> Request:
        item = MediaItem(1, 2, b"d" * 32, pixels=bytes(num_bytes))
        return request(name).with_media((item,))

    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        with pytest.raises(RequestError, match="have 61 bytes after preprocessing"):
            await anext(client.generate(imaged("large", 61)))
        waiting = [asyncio.ensure_future(anext(client.generate(imaged(f"r{i}", 50)))) for i in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="have 100 bytes, and 1 more would exceed"):
            await anext(client.generate(imaged("late", 1)))
        assert await token_ids(client.generate(request("text", max_tokens=1)))
        for refusal in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(refusal, RequestError) and "does not accept image" in str(refusal)
        with pytest.raises(RequestError, match="does not accept image"):  # there is room again
            await anext(client.generate(imaged("again", 50)))
        await client.close()

    asyncio.run(run())


def test_two_clients_get_the_answers_to_their_requests(served: Served) -> None:
    async def run() -> None:
        one = await RemoteClient.connect(served.path, None)
        two = await RemoteClient.connect(served.path, None)
        assert one.ready.client_id != two.ready.client_id
        assert one.ready.settings == {"model": "tiny"}
        prompts = [[i, 2 * i, 5, 7] for i in range(1, 7)]
        many = [
            token_ids(client.generate(request(f"{i} {client.ready.client_id}", prompt)))
            for i, prompt in enumerate(prompts)
            for client in (one, two)
        ]
        got = await asyncio.gather(*many)
        for i, prompt in enumerate(prompts):
            expected = reference_tokens(checkpoint("llama"), prompt, 12)
            assert got[2 * i] == got[2 * i + 1] == expected
        assert one.num_unfinished == two.num_unfinished == 0
        assert await one.metrics() == "# metrics\n"
        await one.close()
        await two.close()

    asyncio.run(run())


def test_closing_the_stream_ends_the_request_in_the_core(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        outputs = client.generate(request("long", max_tokens=80))
        await anext(outputs)
        await outputs.aclose()
        assert client.num_unfinished == 0
        await until_idle(served.core)
        served.core.scheduler.check_invariants()
        assert await token_ids(client.generate(request("next", max_tokens=3)))
        await client.close()

    asyncio.run(run())


def test_any_client_may_cancel_and_the_owner_gets_the_abort(served: Served) -> None:
    """With n=3: some of the sequences may not exist in the core yet."""

    async def run() -> None:
        one = await RemoteClient.connect(served.path, None)
        two = await RemoteClient.connect(served.path, None)
        params = SamplingParams(n=3, seed=1, max_tokens=80, ignore_eos=True)
        many = msgspec.structs.replace(request("many-0"), params=params, tenant="a")
        plain = msgspec.structs.replace(request("plain", max_tokens=80), tenant="b")
        readers = [asyncio.create_task(_last(one.generate(each))) for each in (many, plain)]
        while len(served.core.requests()) < 2:
            await asyncio.sleep(0.001)
        assert await two.cancel(["many", "no-0"], "b") == [], "requests of another tenant"
        assert await two.cancel(["many", "no-0"]) == ["many-0"]
        done = await readers[0]
        assert [each.finish_reason for each in done.outputs] == ["abort"] * 3
        assert await two.cancel(None) == ["plain"]
        assert (await readers[1]).outputs[0].stop_reason == "cancelled"
        assert await two.cancel(None) == []
        assert one.num_unfinished == 0
        await until_idle(served.core)
        await one.close()
        await two.close()

    asyncio.run(run())


async def _last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


def test_disconnected_client_frees_its_requests(served: Served) -> None:
    async def run() -> None:
        gone, stays = [await RemoteClient.connect(served.path, None) for _ in range(2)]
        mine = [gone.generate(request(f"g{i}", max_tokens=85)) for i in range(4)]
        for outputs in mine:
            await anext(outputs)
        waiting = asyncio.create_task(token_ids(stays.generate(request("s", max_tokens=5))))
        await gone.close()
        assert await waiting == reference_tokens(checkpoint("llama"), PROMPT, 5)
        await until_idle(served.core)

    asyncio.run(run())


def test_refusals_name_the_reason_and_leave_no_open_requests(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        with pytest.raises(RequestError, match="max_model_len"):
            await token_ids(client.generate(request("long", [1] * MAX_LEN)))
        with pytest.raises(RequestError, match="vocabulary"):
            await token_ids(client.generate(request("odd", [10**6])))
        params = SamplingParams(n=2)
        with pytest.raises(RequestError, match="in pieces has one output"):
            client.check(Request("open", PROMPT, params, seed=1, is_open=True))
        other = await RemoteClient.connect(served.path, None)
        both = [c.generate(request("same", max_tokens=80)) for c in (client, other)]
        got = await asyncio.gather(*map(token_ids, both), return_exceptions=True)
        [refused] = [error for error in got if isinstance(error, RequestError)]
        assert "in use" in str(refused)  # only the core can know this
        assert client.num_unfinished == other.num_unfinished == 0
        await client.close()
        await other.close()

    asyncio.run(run())


def test_the_core_repeats_the_checks_of_its_clients(served: Served) -> None:
    """The client wrongly assumes a larger vocabulary and a longer context."""

    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        client._ready = msgspec.structs.replace(client.ready, vocab_size=2**40, max_model_len=2**20)
        with pytest.raises(RequestError, match="vocabulary") as raised:
            await token_ids(client.generate(request("odd", [2**39])))
        assert raised.value.field == "prompt"
        with pytest.raises(RequestError, match="max_model_len") as raised:
            await token_ids(client.generate(request("long", [1] * MAX_LEN)))
        assert raised.value.code == CONTEXT_LENGTH_EXCEEDED
        opened = msgspec.structs.replace(request("open"), is_open=True)
        reading = asyncio.create_task(token_ids(client.generate(opened)))
        while not client.num_unfinished:
            await asyncio.sleep(0)
        client.append("open", [2**39])
        with pytest.raises(RequestError, match="vocabulary"):
            await reading
        await until_idle(served.core)
        assert served.core.requests() == ()
        assert await token_ids(client.generate(request("good")))
        await client.close()

    asyncio.run(run())


def test_slow_reader_gets_all_tokens_in_fewer_outputs(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        slow = client.generate(request("slow", max_tokens=40))
        first = await anext(slow)
        await token_ids(client.generate(request("other", [9, 9, 4], max_tokens=60)))
        rest = [output async for output in slow]
        got = first.outputs[0].token_ids + [t for o in rest for t in o.outputs[0].token_ids]
        assert got == reference_tokens(checkpoint("llama"), PROMPT, 40)
        assert len(rest) < 20
        assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "length"
        final = [o async for o in client.generate(request("f", max_tokens=9, kind="FINAL_ONLY"))]
        assert [len(o.outputs[0].token_ids) for o in final] == [9]
        await client.close()

    asyncio.run(run())


def test_samples_of_a_request_end_independently(served: Served) -> None:
    """The client owns the request until its last sequence ends. The core ends a sequence by a stop
    token, the client by a stop string."""
    tok = tokenizer("byte_level")

    def sampled(name: str, **more: object) -> Request:
        params = SamplingParams(n=3, max_tokens=24, output_kind=RequestOutputKind.DELTA, **more)  # type: ignore[arg-type]
        return Request(name, PROMPT, params, 7, tuple(params.stop_token_ids or ()))

    async def run() -> None:
        client = await RemoteClient.connect(served.path, tok)
        free = await samples(client.generate(sampled("free")))
        assert [len(tokens) for tokens in free] == [24] * 3
        stop_id = next(token for token in free[1][4:] if token not in free[1][:4])
        by_token = await samples(client.generate(sampled("token", stop_token_ids=[stop_id])))
        assert by_token == [until(tokens, stop_id) for tokens in free]
        assert len(by_token[1]) < 24, "the stop token must end one of the samples"
        stop = tok.decode([stop_id])
        by_string = await samples(client.generate(sampled("string", stop=[stop])))
        for tokens, expected in zip(by_string, free, strict=True):
            assert tokens == expected[: len(tokens)]
            assert stop not in tok.decode(tokens[:-1])
            assert len(tokens) == 24 or stop in tok.decode(tokens)
        assert len(by_string[1]) < 24
        await until_idle(served.core)
        assert not served.server._owners and client.num_unfinished == 0
        await client.close()

    asyncio.run(run())


async def samples(outputs: AsyncIterator[RequestOutput]) -> list[list[int]]:
    """Return the token ids of three samples."""
    found: list[list[int]] = [[], [], []]
    async for output in outputs:
        for completion in output.outputs:
            found[completion.index] += completion.token_ids
    return found


def until(tokens: list[int], stop_id: int) -> list[int]:
    """Return the tokens up to and including the stop token."""
    return tokens[: tokens.index(stop_id) + 1] if stop_id in tokens else tokens


def test_end_of_the_core_fails_open_and_new_requests(tmp_path: Path) -> None:
    async def run() -> None:
        first = Served(tmp_path)
        client = await RemoteClient.connect(first.path, None)
        outputs = client.generate(request("r", max_tokens=85))
        await anext(outputs)
        reading = asyncio.create_task(token_ids(outputs))
        first.path.rename(tmp_path / "old.sock")
        listener = socket.socket(socket.AF_UNIX)  # a supervisor's: clients wait on it
        listener.bind(str(first.path))
        listener.listen(8)
        await asyncio.to_thread(first.stop)
        with contextlib.suppress(EngineDead):
            await reading  # the core may have finished the request first
        assert not client.is_alive
        with pytest.raises(EngineDead, match="has ended"):
            await token_ids(client.generate(request("refused")))
        with pytest.raises(EngineDead):
            await client.metrics()
        second = Served(tmp_path / "second", first.core)
        await client.close()
        listener.close()
        await asyncio.to_thread(second.stop)

    (tmp_path / "second").mkdir()
    asyncio.run(run())


def test_connection_to_a_missing_socket_is_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(EngineDead):
            await RemoteClient.connect(tmp_path / "nothing.sock", None)

    asyncio.run(run())


def test_invalid_bytes_disconnect_only_their_sender(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        reader, writer = await asyncio.open_unix_connection(str(served.path))
        writer.write(b"\xff\xff\xff\x7f" + b"nonsense" * 10)
        while await reader.read(1000):
            pass  # until the core closes the connection
        assert await token_ids(client.generate(request("still", max_tokens=4)))
        writer.close()
        await client.close()

    asyncio.run(run())

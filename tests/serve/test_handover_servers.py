"""Prompts handed over through Redis and S3. A server that disappears or hangs is a miss within
seconds, and so is a value that is damaged or belongs to another model. Also: blocks that one
engine reads directly from another's memory."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM
from quire.base.kv_orders import Fetch, LookUp
from quire.engine.connectors import make as connectors
from quire.engine.connectors.direct import Piece
from quire.engine.connectors.store import HEADER_BYTES, seal, unseal
from quire.scheduler.reuse.stores import WAIT_S
from tests.engine.connectors.test_direct import MemoryTransfer
from tests.serve.test_handover import (
    BLOCK,
    FIRST_LEG,
    FULL,
    GREEDY,
    PROMPTS,
    SAMPLED,
    SETTINGS,
    generate,
    open_pair,
    port_of,
    scheduler_of,
    secret,
    settled,
    view,
    wanted,
)
from tests.serve.test_same_bits import found, open_llm
from tests.support.engine.attachments import stores_of
from tests.support.engine.store_servers import StoreServer, redis_server, s3_server

__all__ = ["redis_server", "s3_server", "secret", "wanted"]  # fixtures
CALLS_S = 18.0  # for calls without a reply, and a tiny model on a busy machine


SERVERS = ("redis_server", "s3_server")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> StoreServer:
    made: StoreServer = request.getfixturevalue(request.param)
    return made


def run_before(llm: LLM, kind: type, action: Callable[[], None]) -> None:
    """Run an action before each order of a kind is submitted to the stores."""
    connections: Any = stores_of(llm._alive.client.core)
    submit = connections.submit

    def watching(orders: list[Any]) -> None:
        if any(isinstance(order, kind) for order in orders):
            action()
        submit(orders)

    connections.submit = watching


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ("redis_server", LookUp),
        pytest.param("redis_server", Fetch, marks=pytest.mark.slow),
        ("s3_server", Fetch),
        pytest.param("s3_server", LookUp, marks=pytest.mark.slow),
    ],
    indirect=["server"],
)
def test_stopped_server_is_a_miss(server: StoreServer, kind: type, wanted: dict[str, Any]) -> None:
    """The server stops before the look-up, or between the look-up and the fetch."""
    lose(server, server.end, kind, wanted)


def test_hanging_server_is_a_miss(redis_server: Any, wanted: dict[str, Any]) -> None:
    lose(redis_server, redis_server.hang, Fetch, wanted)


def lose(
    server: StoreServer, action: Callable[[], None], kind: type, wanted: dict[str, Any]
) -> None:
    """Run an action on a server while a prompt is handed over: the answers are the same, and arrive
    within seconds."""
    first, second = open_pair(([server.url], [server.url]))
    with first, second:
        kv_params = generate(first, PROMPTS[0], FIRST_LEG, max_tokens=1).kv_transfer_params
        settled(first)
        assert len(server.names()) == FULL
        run_before(second, kind, action)
        begin_s = time.monotonic()
        output = generate(second, PROMPTS[0], kv_params, **GREEDY)
        assert time.monotonic() - begin_s < WAIT_S + CALLS_S
        assert found([output]) == wanted["greedy"][0]
        assert output.num_cached_tokens == 0 == view(second).num_fetched
        # Both engines continue to serve.
        for llm, number in ((first, 1), (second, 2)):
            output = generate(llm, PROMPTS[number], FIRST_LEG, **GREEDY)
            assert found([output]) == wanted["greedy"][number]
            settled(llm)


def harmed(value: bytes, other: bytes, harm: str, fingerprint: bytes) -> bytes:
    """Return what a server gives instead of a value. other: another block's value."""
    if harm == "flipped":
        return value[:-1] + bytes([value[-1] ^ 1])
    if harm == "cut":
        return value[: len(value) // 2]
    if harm == "another block's":
        return other
    # Another model's value: whole, of the same size, and of the same tokens.
    data = value[HEADER_BYTES:]
    group, digest = 0, value[HEADER_BYTES - 36 : HEADER_BYTES - 4]
    assert unseal(value, fingerprint, group, digest, len(data))[0] == data
    foreign = bytes(each ^ 1 for each in fingerprint)
    return seal(foreign, group, digest, data) + data


HARMS = ("flipped", "cut", "another block's", "another model's")
QUICK = (("redis_server", "another block's"), ("redis_server", "flipped"), ("s3_server", "cut"))


@pytest.mark.parametrize(
    ("server", "harm"),
    [
        pytest.param(
            server,
            harm,
            marks=[] if (server, harm) in QUICK else pytest.mark.slow,
        )
        for server in SERVERS
        for harm in HARMS
    ],
    indirect=["server"],
)
def test_damaged_values_are_recomputed(
    server: StoreServer, harm: str, wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The blocks before and after the damaged one are fetched."""
    first, second = open_pair(([server.url], [server.url]))
    with first, second:
        kv_params = generate(first, PROMPTS[0], FIRST_LEG, max_tokens=1).kv_transfer_params
        settled(first)
        fingerprint = scheduler_of(first).memory.names.fingerprint
        names = server.names()
        values = [server.read(name) for name in names]
        server.write(names[3], harmed(values[3], values[4], harm, fingerprint))
        output = generate(second, PROMPTS[0], kv_params, **SAMPLED)
        assert found([output]) == wanted["sampled"][0]
        assert view(second).num_fetched == FULL - 1
        assert output.num_cached_tokens < FULL * BLOCK
        assert "is not used: " in caplog.text
        settled(second)


@pytest.mark.parametrize(
    "server", [SERVERS[0], pytest.param(SERVERS[1], marks=pytest.mark.slow)], indirect=True
)
def test_engines_of_two_models_share_a_server(server: StoreServer) -> None:
    """Each model hits only its own blocks of the same prompt."""
    store = {"kv_store": [server.url]}
    half = SETTINGS | {"dtype": "bfloat16"}
    with open_llm("qwen3", **SETTINGS, **store) as one, open_llm("qwen3", **half, **store) as two:
        for number, llm in enumerate((one, two), 1):
            kv_params = generate(llm, PROMPTS[0], FIRST_LEG, max_tokens=1).kv_transfer_params
            settled(llm)
            assert view(llm).num_fetched == 0
            assert len(server.names()) == number * FULL
        with open_llm("qwen3", **half, **store) as third:
            assert generate(third, PROMPTS[0], kv_params).num_cached_tokens == FULL * BLOCK


@pytest.mark.parametrize("name", ["memory", "nixl"])
def test_directly_read_blocks_give_the_same_tokens(
    name: str,
    wanted: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Blocks move from one engine's host memory into a buffer of the other's. Blocks that are
    damaged on the way are recomputed."""
    if name == "nixl":
        pytest.importorskip("nixl")
    made: list[MemoryTransfer] = []

    def make() -> MemoryTransfer:
        made.append(MemoryTransfer())
        return made[-1]

    if name == "memory":
        monkeypatch.setattr(connectors, "make_transfer", lambda _: make())
    via = f"?via={name}"
    with open_llm("qwen3", kv_store=f"serve://127.0.0.1:0{via}", **SETTINGS) as first:
        peer = f"peer://127.0.0.1:{port_of(first)}{via}"
        with open_llm("qwen3", kv_store=peer, **SETTINGS) as second:
            for number, prompt in enumerate(PROMPTS[:2]):
                kv_params = generate(first, prompt, FIRST_LEG, max_tokens=1).kv_transfer_params
                output = generate(second, prompt, kv_params, **SAMPLED)
                assert found([output]) == wanted["sampled"][number]
                assert output.num_cached_tokens == FULL * BLOCK
            assert "over TCP" not in caplog.text
            if made:
                assert made[1].num_read == 2 * FULL
                read = made[1].copy
                made[1].copy = lambda piece: read(  # type: ignore[method-assign]
                    Piece(piece.source + 1, piece.target, piece.num_bytes - 1)
                )
                kv_params = generate(first, PROMPTS[2], FIRST_LEG, max_tokens=1).kv_transfer_params
                output = generate(second, PROMPTS[2], kv_params, **SAMPLED)
                assert found([output]) == wanted["sampled"][2] and output.num_cached_tokens == 0
            settled(first)
            settled(second)

"""An API process, which the supervisor starts: python -m quire.serve.api.api_process. No torch.

Its configuration comes as JSON on standard input; it answers HTTP on the bound socket that it
inherits, and writes its index to `--ready` when it does. SIGTERM drains: new work is refused, open
requests go on for up to --shutdown-timeout, then end with an error.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import uvicorn
from fastapi import FastAPI

from quire.base.config import ModelConfig, ServerConfig
from quire.base.errors import EngineDead, QuireError
from quire.engine.child import NO_START, begin_child, collecting_rarely
from quire.engine.fleet import CoreClient, client_of
from quire.engine.text import build_text_side
from quire.models.source import ModelSource, resolve_source
from quire.serve.api.app import create_app
from quire.serve.api.batches.batches import Batches, open_batches
from quire.serve.api.context import ApiContext
from quire.serve.api.http import TextProtocol, TimedProtocol
from quire.serve.api.listener import Listener, report
from quire.serve.api.observers import Observers
from quire.serve.api.peers import Peers
from quire.serve.api.reading import MAX_WIDE_BYTES
from quire.serve.children import READY
from quire.serve.hooks import Hooks
from quire.serve.rate_limits import RateLimits

logger = logging.getLogger("quire")

POLL_S = 0.05
CLOSE_S = 2.0
MAX_DIGITS = 640  # of a number that a client sends; reading one takes the square of their number
PING_S = 20.0  # WebSockets: a client that does not answer for as long has gone


class ApiConfig(msgspec.Struct, frozen=True):
    """What an API process is told."""

    model: ModelConfig
    server: ServerConfig


class ApiServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
    """Serve until told to end."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time, in our threads
    options = _arguments()
    begin_child(options.log_level)
    sys.set_int_max_str_digits(MAX_DIGITS)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ApiConfig)
    try:
        source = resolve_source(config.model, progress=False)
        return asyncio.run(_serve(config, source, options))
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return NO_START


async def _serve(config: ApiConfig, source: ModelSource, options: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    loop.set_exception_handler(report)
    text = build_text_side(config.model, source, options.index)
    text.renderer.prepare()
    client = client_of(options.core, text.tokenizer)
    client.start()
    names = config.server.served_model_name or (source.name,)
    count, has_tls = config.server.api_server_count, config.server.ssl_certfile is not None
    peers = Peers(options.index, count, options.core[0].parent, has_tls)
    context = ApiContext(
        client, text.renderer, text.requests, names, config.server, int(time.time()),
        peers=peers,
    )  # fmt: skip
    if options.rates is not None:
        context.rates = RateLimits(config.server.rate_limits, options.rates)
    observers = Observers(client, config.server, names[0], context.rates)
    context.client = observers.client
    if config.server.hooks:
        context.hooks = Hooks(config.server.hooks, config.server.hook_timeout)
    batches = open_batches(config.server)
    server = ApiServer(uvicorn_config(context, options.log_level, batches))
    ready = asyncio.create_task(client.wait_until_ready())
    ending = asyncio.create_task(asked.wait())
    await asyncio.wait((ready, ending), return_when=asyncio.FIRST_COMPLETED)
    try:
        if not ready.done():
            ready.cancel()
            return 0
        await ready  # EngineDead, if the core will never come
        with collecting_rarely():
            await _serve_until(server, options, ending, context, client, batches)
        return 0
    finally:
        await observers.close()


async def _serve_until(
    server: ApiServer,
    options: argparse.Namespace,
    ending: "asyncio.Task[bool]",
    context: ApiContext,
    client: CoreClient,
    batches: Batches | None,
) -> None:
    """Answer requests, and run batches; then let open requests finish."""
    if batches is not None:
        batches.start(cast(FastAPI, server.config.app))
    sockets: list[socket.socket] = [Listener(fileno=options.socket)]
    if (for_peers := context.peers.listener()) is not None:
        sockets.append(for_peers)
    serving = asyncio.create_task(server.serve(sockets))
    await _until(lambda: server.started or serving.done())
    if not serving.done():
        os.write(options.ready, READY.pack(options.index))
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    if batches is not None:
        await batches.stop()
    if not serving.done():
        await _drain(context, client)
        server.should_exit = True
    await serving


async def _drain(context: ApiContext, client: CoreClient) -> None:
    """Let open requests finish, then end those that are left with an error."""
    context.draining = True
    end_s = time.monotonic() + context.config.shutdown_timeout
    if context.num_open:
        logger.info(
            "waiting up to %g s for %d open requests; stop once more to end them now",
            context.config.shutdown_timeout, context.num_open,
        )  # fmt: skip
    await _until(lambda: context.num_open == 0 or time.monotonic() > end_s)
    if context.num_open:
        client.fail_all(EngineDead("the server is shutting down."))
        end_s = time.monotonic() + CLOSE_S
        await _until(lambda: context.num_open == 0 or time.monotonic() > end_s)


async def _until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(POLL_S)


def uvicorn_config(
    context: ApiContext, log_level: str, batches: Batches | None = None
) -> uvicorn.Config:
    """Configure uvicorn: h11, because it limits the size of headers."""
    server = context.config
    return uvicorn.Config(
        create_app(context, batches),
        http=TimedProtocol,
        ws=TextProtocol,
        ws_max_size=min(server.max_body_bytes, MAX_WIDE_BYTES),
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,  # messages are small, and a window per connection is not
        lifespan="off",
        access_log=log_level == "debug",
        log_level="info" if log_level == "debug" else "warning",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(CLOSE_S),
        root_path=server.root_path,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the bound socket")
    parser.add_argument("--ready", type=int, required=True, help="descriptor to say `ready` on")
    add = parser.add_argument
    add("--core", type=Path, action="append", required=True, help="each core's Unix socket")
    add("--rates", type=int, help="descriptor of the keys' rate limits, if there are any")
    parser.add_argument("--index", type=int, required=True, help="which of the API processes")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

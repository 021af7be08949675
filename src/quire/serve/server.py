"""An API process: `python -m quire.serve.server`, started by the supervisor. Imports no torch.

It reads its configuration as JSON from standard input and serves HTTP on an inherited socket. When
it is ready, it writes its index to the descriptor `--ready`. On SIGTERM it drains: it refuses new
work and lets open requests continue for up to --shutdown-timeout. Then it fails the rest.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import uvicorn
from fastapi import FastAPI

from quire.base.errors import EngineDead, QuireError
from quire.base.settings.config import ServerConfig
from quire.engine.wire.child import NO_START, begin_child, collecting_rarely
from quire.engine.wire.logs import print_error
from quire.models.checkpoint.source import ModelSource, resolve_source
from quire.serve.adapters import add_configured
from quire.serve.app import create_app
from quire.serve.batches.batches import Batches, open_batches
from quire.serve.bodies.counts import MAX_WIDE_BYTES
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import Hooks
from quire.serve.http.http import Listener, TextProtocol, TimedProtocol, report_loop_error
from quire.serve.observers.rate_limits import RateLimits
from quire.serve.peers import Peers
from quire.serve.processes.children import READY
from quire.serve.several.front import ModelFront, share_context
from quire.serve.several.link import ModelLink
from quire.serve.several.messages import LOADED
from quire.serve.several.served import ApiModel

logger = logging.getLogger("quire")

POLL_S = 0.05
CLOSE_S = 2.0
_ENDING = "the server is shutting down."
MAX_DIGITS = 640  # digits of a number in a request; parsing takes quadratic time
PING_S = 20.0  # WebSocket ping interval, and the timeout of the client's reply


class ApiConfig(msgspec.Struct, frozen=True):
    """Configuration of an API process, which the supervisor sends."""

    models: list[ApiModel]
    server: ServerConfig


class ApiServer(uvicorn.Server):
    """uvicorn server without signal handlers, because ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
    """Serve until SIGTERM; return the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our threads take one text at a time
    options = _arguments()
    begin_child(options.log_level)
    sys.set_int_max_str_digits(MAX_DIGITS)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ApiConfig)
    try:
        sources = [resolve_source(each.model, progress=False) for each in config.models]
        return asyncio.run(_serve(config, sources, options))
    except QuireError as error:
        print_error(error)
        return NO_START


async def _serve(
    config: ApiConfig, sources: Sequence[ModelSource], options: argparse.Namespace
) -> int:
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop_requested.set)
    loop.set_exception_handler(report_loop_error)
    link = None
    if options.manager is not None:
        link = ModelLink(options.manager, config.server.model_wait_s)
        await link.start()
    rates = None
    if options.rates is not None:
        rates = RateLimits(config.server.rate_limits, options.rates)
    fronts = [
        ModelFront.make(model, source, config.server, options.index, rates, link)
        for model, source in zip(config.models, sources, strict=True)
    ]
    context = _context(config, fronts, options, rates, link)
    batches = open_batches(config.server)
    server = ApiServer(uvicorn_config(context, options.log_level, batches))
    ready = asyncio.create_task(_wait_until_ready(fronts, link))
    ending = asyncio.create_task(stop_requested.wait())
    await asyncio.wait((ready, ending), return_when=asyncio.FIRST_COMPLETED)
    try:
        if not ready.done():
            ready.cancel()
            return 0
        await ready  # EngineDead, if the core will never be ready
        await add_configured(context)
        with collecting_rarely():
            await _serve_until(server, options, ending, context, fronts, link, batches)
        return 0
    finally:
        for front in fronts:
            await front.observers.close()
        if link is not None:
            await link.close()


def _context(
    config: ApiConfig,
    fronts: Sequence[ModelFront],
    options: argparse.Namespace,
    rates: RateLimits | None,
    link: ModelLink | None,
) -> ApiContext:
    """Return the context that handlers share. With several models it is the first model's context,
    which refers to the others' contexts."""
    server, first = config.server, fronts[0]
    count, has_tls = server.api_server_count, server.ssl_certfile is not None
    home = Path(config.models[0].cores[0]).parent
    context = ApiContext(
        first.observers.client, first.text.renderer, first.text.requests, first.names, server,
        int(time.time()), peers=Peers(options.index, count, home, has_tls), rates=rates,
    )  # fmt: skip
    if server.hooks:
        context.hooks = Hooks(server.hooks, server.hook_timeout)
    if link is not None:
        share_context(context, fronts, link)
    return context


async def _wait_until_ready(fronts: Sequence[ModelFront], link: ModelLink | None) -> None:
    """Wait for the model; with several, for the models that are loaded at the start. Raise
    EngineDead if the only model will never be ready."""
    if link is None:
        await fronts[0].core.wait_until_ready()
        return
    await link.wait_until_settled()
    for front in fronts:
        assert front.leased is not None
        if link.states[front.names[0]].state == LOADED:
            with contextlib.suppress(QuireError):  # the model has ended meanwhile
                await front.leased.wait_until_known()


async def _serve_until(
    server: ApiServer,
    options: argparse.Namespace,
    ending: "asyncio.Task[bool]",
    context: ApiContext,
    fronts: Sequence[ModelFront],
    link: ModelLink | None,
    batches: Batches | None,
) -> None:
    """Answer requests and run batches until SIGTERM, then drain open requests."""
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
        await _drain(context, fronts, link)
        server.should_exit = True
    await serving


async def _drain(context: ApiContext, fronts: Sequence[ModelFront], link: ModelLink | None) -> None:
    """Wait for open requests up to the shutdown timeout, then fail the remaining requests."""
    context.draining = True
    end_s = time.monotonic() + context.config.shutdown_timeout
    if context.num_open:
        logger.info(
            "waiting up to %g s for %d open requests; stop again to end them now",
            context.config.shutdown_timeout, context.num_open,
        )  # fmt: skip
    await _until(lambda: context.num_open == 0 or time.monotonic() > end_s)
    if context.num_open:
        for front in fronts:
            front.core.fail_all(EngineDead(_ENDING))
        if link is not None:
            link.deny_all(_ENDING)
        end_s = time.monotonic() + CLOSE_S
        await _until(lambda: context.num_open == 0 or time.monotonic() > end_s)


async def _until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(POLL_S)


def uvicorn_config(
    context: ApiContext, log_level: str, batches: Batches | None = None
) -> uvicorn.Config:
    """Configure uvicorn with h11, which limits the size of headers."""
    server = context.config
    return uvicorn.Config(
        create_app(context, batches),
        http=TimedProtocol,
        ws=TextProtocol,
        ws_max_size=min(server.max_body_bytes, MAX_WIDE_BYTES),
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,  # messages are small; a window per connection is large
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
    add(
        "--manager",
        type=Path,
        help="Unix socket of the process that loads models, for several models",
    )
    add("--rates", type=int, help="descriptor of the keys' rate limits, if there are any")
    parser.add_argument("--index", type=int, required=True, help="which of the API processes")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

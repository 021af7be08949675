"""The core's process: python -m quire.serve.processes.core_main, started by the supervisor.

Its configuration arrives as JSON on standard input. Clients connect through a listening Unix socket
that the process inherits. Exit status: 0 after a request to stop, 3 if it could not start, 1 if the
core cannot continue.
"""

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path

import msgspec

from quire.base.clock import MonotonicClock
from quire.base.errors import QuireError
from quire.base.messages import Ready
from quire.base.settings.config import EngineConfig, public_settings
from quire.engine.attachments.kv_events import publish_events
from quire.engine.observability.beating import BeatingExecutor
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.heartbeat import Heartbeat, expected_step_s
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.observability.status import StatusLine
from quire.engine.observability.timeline import Timelines
from quire.engine.start.build import BuiltCore, build_core, ended_if_raised, start_ranks
from quire.engine.start.prefix_file import pin_configured
from quire.engine.start.text import build_text_side
from quire.engine.wire.child import NO_START, begin_child, collecting_rarely
from quire.engine.wire.core_server import CoreReports, CoreServer
from quire.engine.wire.logs import print_error
from quire.engine.wire.orders import announce_changes, order_handlers
from quire.models.checkpoint.source import resolve_source
from quire.ops.host.fast_cores import stay_on_fast_cores
from quire.ops.host.torch_import import declare_own_process
from quire.serve.processes.launch import FAILURE, StartFailure
from quire.serve.processes.progress import LoadBar

logger = logging.getLogger("quire")


def main() -> int:
    """Load the model, serve clients until SIGTERM, and return the exit status."""
    options = _arguments()
    declare_own_process()
    begin_child(options.log_level, _log_name(options))
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        if options.num_cores == 1:  # otherwise each core has its share of the processors
            cores = stay_on_fast_cores()
            if cores.cpus:
                logger.info("threads stay on %s", cores.reason)
        ranks = start_ranks(config)
        clock = MonotonicClock()
        shows_bar = options.core == 0 and not options.is_one_model_of_several
        with LoadBar(enabled=shows_bar) as bar, ended_if_raised(ranks):
            source = resolve_source(config.model, progress=False)
            built = build_core(config, source, clock, bar.update, ranks, str(options.home))
        publish_events(built.core, built.config, options.core)
        if config.cache.pin_prefix is not None:  # otherwise this process needs no text
            pin_configured(built.core, config.cache, build_text_side(config.model, source))
        server = _make_server(built, options, options.name or source.name)
    except QuireError as error:
        print_error(error)
        failure = StartFailure(type(error).__name__, str(error))
        (options.home / FAILURE).write_bytes(msgspec.json.encode(failure))
        return NO_START
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    try:
        with collecting_rarely():
            server.run()
    except Exception as error:
        logger.critical("the engine cannot continue: %s", error, exc_info=error)
        return 1
    finally:
        built.core.close()
    return 0


def _log_name(options: argparse.Namespace) -> str:
    """Return the prefix of this process's log lines."""
    if options.is_one_model_of_several:
        return f"model {options.name}"
    return f"core {options.core}" if options.num_cores > 1 else ""


def _make_server(built: BuiltCore, options: argparse.Namespace, name: str) -> CoreServer:
    config, clock = built.config, MonotonicClock()
    length = config.model.max_model_len or 0
    core, cache = built.core, config.cache
    num_rows = config.scheduler.max_num_seqs or 0
    metrics = EngineMetrics(num_rows, length, cache.enable_prefix_caching)
    exposition = Exposition(
        metrics,
        core.view,
        name,
        cache,
        options.core,
        built.rank_times,
        options.metrics_prefix,
        built.adapters,
    )
    built.core.subscribe(metrics)
    timelines = Timelines.of(core.view(), core.requests())
    built.core.subscribe(timelines)
    status = None
    if not config.disable_log_stats:
        status = StatusLine(metrics, core.view)
    ready = Ready(
        client_id=0,
        vocab_size=built.spec.vocab_size,
        max_model_len=length,
        max_logprobs=config.max_logprobs,
        max_num_seqs=num_rows,
        settings=public_settings(config),
        memory=built.memory.describe(),
        pooling=built.spec.pooling,
        architecture=built.spec.model_type,
        weights_bytes=built.memory.weights_bytes,
        numerics=built.numerics(),
    )
    expected_s = expected_step_s(config, config.device, built.memory.weights_bytes)
    heartbeat = Heartbeat(options.home / "heartbeat", expected_s)
    built.progress.listener = lambda limit_s: heartbeat.extend(clock.now(), limit_s)
    built.core.executor = BeatingExecutor(built.core.executor, heartbeat, clock)
    listener = socket.socket(fileno=options.listener)
    reports = CoreReports(exposition.text, status, heartbeat, timelines.text)
    handlers = order_handlers(built.updates, built.pausing, built.sleeping)
    server = CoreServer(built.core, listener, ready, reports, clock, handlers)
    announce_changes(built.updates, server, built.numerics)
    return server


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the socket")
    parser.add_argument("--home", type=Path, required=True, help="the private directory")
    parser.add_argument("--name", help="what metrics call the model; its own name if absent")
    parser.add_argument("--metrics-prefix", default="quire", help="of the names of metrics")
    parser.add_argument("--is-one-model-of-several", action="store_true", help="for the log")
    parser.add_argument("--core", type=int, default=0, help="its number")
    parser.add_argument("--num-cores", type=int, default=1, help="how many there are")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

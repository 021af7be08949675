"""Latency and throughput of a server, under a load that arrives at a given rate.

    quire bench serve --num-prompts 64 --request-rate 4

Any server with OpenAI's API will do. Requests arrive as a Poisson process (or burstier, or evener),
at the same times for the same seed; `--max-concurrency` holds back those that would be too many,
whose time begins when they are sent. The client is one thread on one event loop: where a server
gives more chunks per second than it can read, it is the client that is measured (it then uses a
whole core, which `client_cpu_share` of the results shows).
"""

import argparse
import asyncio
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.errors import ConfigError
from quire.tools.bench.arguments import METRICS
from quire.tools.bench.asking import Asker, as_texts, make_asker
from quire.tools.bench.datasets import BenchRequest, Tokens, make_requests
from quire.tools.bench.guesses import Guesses, block_lines, read_guesses
from quire.tools.bench.guesses import json_keys as guesses_json
from quire.tools.bench.metrics import (
    RequestResult,
    ServingMetrics,
    block,
    json_details,
    json_keys,
    measure,
)
from quire.tools.bench.tokens import LocalTokens, ServerTokens
from quire.tools.http_client import HttpClient, HttpError, first_model
from quire.tools.report import plain_facts, write_report

READY_POLL_S = 0.25
ERRORS_SHOWN = 3
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Wanted:
    """Which results: read from the options before anything runs."""

    shown: tuple[str, ...]
    percentiles: tuple[float, ...]
    limits_ms: dict[str, float]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> "Wanted":
        """Read what is wanted from the options. Raises ConfigError."""
        shown = tuple(name for name in options.percentile_metrics.split(",") if name)
        for name in shown:
            _check_metric(name, "--percentile-metrics", METRICS)
        percentiles = tuple(
            _number(p, "--metric-percentiles", 100.0) for p in options.metric_percentiles.split(",")
        )
        limits: dict[str, float] = {}
        for pair in options.goodput:
            name, _, limit = pair.partition(":")
            _check_metric(name, "--goodput", GOODPUT_METRICS)
            limits[name] = _number(limit, "--goodput", math.inf)
        return cls(shown, percentiles, limits)


@dataclass(frozen=True)
class Load:
    """How requests arrive."""

    rate_per_s: float
    burstiness: float
    max_concurrency: int | None
    seed: int

    def arrivals_s(self, num: int) -> list[float]:
        """Draw when each request is sent. Stretched so that the last one comes at num / rate: the
        rate of the run is the one asked for, also where the run is short."""
        if self.rate_per_s == math.inf:
            return [0.0] * num
        rng = np.random.default_rng([self.seed, 2])
        scale = 1.0 / (self.rate_per_s * self.burstiness)
        times = np.cumsum(rng.gamma(self.burstiness, scale, num))
        stretched: list[float] = (times * (num / self.rate_per_s / times[-1])).tolist()
        return stretched


@dataclass(frozen=True)
class Outcome:
    """Of one run. client_cpu_share: of a core, that this process used. guesses: that the server
    tried meanwhile."""

    results: list[RequestResult]
    duration_s: float
    client_cpu_share: float
    guesses: Guesses = Guesses()


async def send_all(
    ask: Callable[[BenchRequest], Any],
    requests: list[BenchRequest],
    load: Load,
    done: Callable[[], None],
) -> Outcome:
    """Send each request when it is due. done: called after each."""
    slots = (
        nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    )

    async def one(request: BenchRequest) -> RequestResult:
        async with slots:
            result: RequestResult = await ask(request)
        done()
        return result

    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, at_s in zip(requests, load.arrivals_s(len(requests)), strict=True):
            wait_s = began + at_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(request)))
    duration_s = time.perf_counter() - began
    results = [task.result() for task in tasks]
    return Outcome(results, duration_s, (time.process_time() - cpu) / duration_s)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if all requests failed."""
    wanted = Wanted.from_options(options)
    client = HttpClient(_base_url(options), _headers(options), verify=not options.insecure)
    load = Load(
        options.request_rate, options.burstiness, options.max_concurrency, options.seed
    )  # fmt: skip
    with asyncio.Runner() as runner:
        runner.run(wait_until_ready(client, options.ready_check_timeout_sec))
        model = options.model or runner.run(first_model(client))
        tokens = _tokens(options, runner, client, model)
        asker = make_asker(options, client, model)
        requests = make_requests(options, tokens, options.seed)
        if asker.is_chat:
            requests = as_texts(requests, tokens)
        runner.run(_warm_up(asker, requests[0], options.num_warmups))
        before = runner.run(read_guesses(client))
        with _Bar(len(requests), enabled=not options.disable_tqdm) as bar:
            outcome = runner.run(send_all(asker.ask, requests, load, bar.advance))
        guesses = runner.run(read_guesses(client)).since(before)
        runner.run(client.close())
    metrics = measure(
        outcome.results, outcome.duration_s, wanted.percentiles, wanted.limits_ms
    )  # fmt: skip
    more = block_lines(guesses)
    print(block(metrics, wanted.shown, load.max_concurrency, load.rate_per_s, more), flush=True)
    _show_errors(outcome.results)
    _save(options, model, metrics, dataclasses.replace(outcome, guesses=guesses))
    return 1 if metrics.completed == 0 else 0


async def wait_until_ready(client: HttpClient, timeout_s: float) -> None:
    """Wait until the server lists its models; the first refusal is final once it answers at all."""
    deadline = time.monotonic() + timeout_s
    while timeout_s > 0:
        try:
            await client.request("/v1/models", timeout_s=max(1.0, timeout_s))
            return
        except HttpError as error:
            if error.status not in (0, 503) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(READY_POLL_S)


async def _warm_up(asker: Asker, request: BenchRequest, num: int) -> None:
    """Send some one at a time; a server that refuses the first one would refuse them all."""
    for _ in range(num):
        result = await asker.ask(request)
        if not result.is_ok:
            raise HttpError(f"the warm-up failed: {result.error}")


def _tokens(
    options: argparse.Namespace, runner: asyncio.Runner, client: HttpClient, model: str
) -> Tokens:
    if options.tokenizer is not None:
        return LocalTokens(options.tokenizer)
    return ServerTokens(runner, client, model)


def _base_url(options: argparse.Namespace) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    url: str = options.base_url or f"http://{host}:{options.port}"
    return url


def _headers(options: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for pair in options.header:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--header {pair!r} is not NAME=VALUE.")
        headers[name] = value
    return headers


def _check_metric(name: str, flag: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{flag} knows {', '.join(known)}, not {name!r}.")


def _number(text: str, flag: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ConfigError(f"{flag}: {text!r} is no number from 0 to {most:g}.")
    return value


def _show_errors(results: list[RequestResult]) -> None:
    """Print the first different ones."""
    errors = list(dict.fromkeys(result.error for result in results if not result.is_ok))
    for error in errors[:ERRORS_SHOWN]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > ERRORS_SHOWN:
        print(f"... and {len(errors) - ERRORS_SHOWN} other errors", file=sys.stderr)


def _save(
    options: argparse.Namespace, model: str, metrics: ServingMetrics, outcome: Outcome
) -> None:
    """Write the results where --output-json and --save-result say."""
    now = datetime.now()
    date = now.strftime("%Y%m%d-%H%M%S")
    rate = "inf" if options.request_rate == math.inf else options.request_rate
    found: dict[str, Any] = {
        "date": date,
        "backend": options.backend,
        "model_id": model,
        "tokenizer_id": options.tokenizer or model,
        "num_prompts": options.num_prompts,
        "request_rate": rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
        "client_cpu_share": outcome.client_cpu_share,
    } | json_keys(metrics)
    found |= guesses_json(outcome.guesses)
    if options.save_detailed:
        found |= json_details(outcome.results)
    write_report(options.output_json, found, plain_facts)
    if options.save_result or options.result_dir:
        open_most = options.max_concurrency
        limit = "" if open_most is None else f"-concurrency{open_most}"
        name = f"{options.backend}-{rate}qps{limit}-{Path(model).name}-{date}.json"
        path = (options.result_dir or Path()) / name
        write_report(path, found, plain_facts)


class _Bar:
    """Requests done, on standard error, if that is a terminal."""

    def __init__(self, num: int, enabled: bool) -> None:
        self._progress: Any = None
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(
                *columns, console=Console(stderr=True), refresh_per_second=2, transient=True
            )
            self._task = self._progress.add_task("", total=num)

    def __enter__(self) -> "_Bar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

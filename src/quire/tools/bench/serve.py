"""Measure latency and throughput of a server, under a load with a given arrival rate.

    quire bench serve --num-prompts 64 --request-rate 4

Any server with OpenAI's API works. Requests arrive as a Poisson process (or burstier or smoother),
at the same times for the same seed. `--max-concurrency` delays requests beyond it; their time
starts when they are sent. The client is one thread with one event loop. If a server sends more
chunks than the client can read, the benchmark measures the client. `client_cpu_share` in the
results is then a whole core.
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

from quire.base.errors import ConfigError
from quire.serve.processes.progress import CountBar
from quire.tools.bench.bench_request import Asker, as_texts, make_asker
from quire.tools.bench.datasets import BenchRequest, Tokens, make_requests
from quire.tools.bench.drafts import DraftCounts, block_lines, read_draft_counts
from quire.tools.bench.drafts import json_keys as guesses_json
from quire.tools.bench.load import Load
from quire.tools.bench.metrics import (
    RequestResult,
    ServingMetrics,
    block,
    json_details,
    json_keys,
    measure,
)
from quire.tools.bench.shown_metrics import ShownMetrics
from quire.tools.bench.tokens import LocalTokens, ServerTokens
from quire.tools.http_client import HttpClient, HttpError, first_model
from quire.tools.report import plain_facts, write_report

READY_POLL_S = 0.25
ERRORS_SHOWN = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run."""

    results: list[RequestResult]
    duration_s: float
    client_cpu_share: float  # cores that this process used
    draft_counts: DraftCounts = DraftCounts()  # the server's draft tokens during the run


async def send_all(
    send: Callable[[BenchRequest], Any],
    requests: list[BenchRequest],
    load: Load,
    done: Callable[[], None],
) -> Outcome:
    """Send each request when it is due, and call `done` after each."""
    slots = (
        nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    )

    async def one(request: BenchRequest) -> RequestResult:
        async with slots:
            result: RequestResult = await send(request)
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
    """Run the command and return the exit status: 1 if all requests failed."""
    shown_metrics = ShownMetrics.from_options(options)
    client = make_client(options)
    load = Load(
        options.request_rate, options.burstiness, options.max_concurrency, options.seed
    )  # fmt: skip
    with asyncio.Runner() as runner:
        runner.run(wait_until_ready(client, options.ready_check_timeout_sec))
        model = options.model or runner.run(first_model(client))
        tokens = make_tokens(options, runner, client, model)
        asker = make_asker(options, client, model)
        requests = make_requests(options, tokens, options.seed)
        if asker.is_chat:
            requests = as_texts(requests, tokens)
        runner.run(_warm_up(asker, requests[0], options.num_warmups))
        before = runner.run(read_draft_counts(client))
        with CountBar(len(requests), "Requests", not options.disable_tqdm) as bar:
            outcome = runner.run(send_all(asker.send, requests, load, bar.advance))
        draft_counts = runner.run(read_draft_counts(client)).since(before)
        runner.run(client.close())
    metrics = measure(
        outcome.results, outcome.duration_s, shown_metrics.percentiles, shown_metrics.limits_ms
    )  # fmt: skip
    more = block_lines(draft_counts)
    print(
        block(metrics, shown_metrics.shown, load.max_concurrency, load.rate_per_s, more), flush=True
    )
    show_errors(outcome.results)
    _save(options, model, metrics, dataclasses.replace(outcome, draft_counts=draft_counts))
    return 1 if metrics.completed == 0 else 0


async def wait_until_ready(client: HttpClient, timeout_s: float) -> None:
    """Wait until the server lists its models. Raises HttpError on timeout or another error."""
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
    """Send requests one by one. Raises HttpError if one fails."""
    for _ in range(num):
        result = await asker.send(request)
        if not result.is_ok:
            raise HttpError(f"the warm-up failed: {result.error}")


def make_tokens(
    options: argparse.Namespace, runner: asyncio.Runner, client: HttpClient, model: str
) -> Tokens:
    """Return the tokenizer that the options name, by default the server's."""
    if options.tokenizer is not None:
        return LocalTokens(options.tokenizer)
    return ServerTokens(runner, client, model)


def make_client(options: argparse.Namespace) -> HttpClient:
    """Return a client for the server that the options name. Raises ConfigError."""
    return HttpClient(_base_url(options), _headers(options), verify=not options.insecure)


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


def show_errors(results: list[RequestResult]) -> None:
    """Print the first few distinct errors."""
    errors = list(dict.fromkeys(result.error for result in results if not result.is_ok))
    for error in errors[:ERRORS_SHOWN]:
        print(f"failed: {error}", file=sys.stderr)
    if len(errors) > ERRORS_SHOWN:
        print(f"... and {len(errors) - ERRORS_SHOWN} other errors", file=sys.stderr)


def _save(
    options: argparse.Namespace, model: str, metrics: ServingMetrics, outcome: Outcome
) -> None:
    """Write the results to the files of --output-json and --save-result."""
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
    found |= guesses_json(outcome.draft_counts)
    if options.save_detailed:
        found |= json_details(outcome.results)
    write_report(options.output_json, found, plain_facts)
    if options.save_result or options.result_dir:
        open_most = options.max_concurrency
        limit = "" if open_most is None else f"-concurrency{open_most}"
        name = f"{options.backend}-{rate}qps{limit}-{Path(model).name}-{date}.json"
        path = (options.result_dir or Path()) / name
        write_report(path, found, plain_facts)

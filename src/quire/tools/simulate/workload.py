"""The workload of a simulation: a trace, or random requests from one seed, with arrival times.

Requests are created when they arrive, so that a long trace's prompts do not fill the memory.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from quire.base.settings.config import ModelConfig
from quire.tools.bench.datasets import BenchRequest, make_requests
from quire.tools.bench.load import Load
from quire.tools.bench.tokens import LocalTokens
from quire.tools.simulate.arrivals import Arrival, simulated_request
from quire.tools.simulate.run import Caused, Incoming
from quire.tools.traces import Trace, TraceRequest
from quire.tools.workloads import token_ids_of


class Work(Protocol):
    """A workload: its name, number of requests, and mean rate."""

    name: str
    num: int
    rate_per_s: float

    def arrivals(self) -> Iterator[Incoming]:
        """Yield the independent arrivals, ordered by time."""
        ...

    def then(self, request_id: str, now: float) -> Caused:
        """Return the arrivals that a request's end causes."""
        ...

    def refused(self, request_id: str, now: float) -> Caused:
        """Return the arrivals that a request's refusal causes."""
        ...


@dataclass
class Synthetic:
    """Requests of the benchmarks' datasets, with the arrival times of `load`."""

    name: str
    requests: list[BenchRequest]
    load: Load
    num_tenants: int = 1

    def __post_init__(self) -> None:
        self.num = len(self.requests)
        self.rate_per_s = self.load.rate_per_s

    def arrivals(self) -> Iterator[Incoming]:
        rng = np.random.default_rng([self.load.seed, 3])
        tenants = rng.integers(0, self.num_tenants, self.num).tolist()
        times = self.load.arrivals_s(self.num)
        for i, (at_s, each) in enumerate(zip(times, self.requests, strict=True)):
            assert isinstance(each.prompt, list), "prompts must be token ids here"
            tenant = f"tenant {tenants[i] + 1}" if self.num_tenants > 1 else ""
            request = simulated_request(str(i), each.prompt, None, tenant)
            yield Arrival(at_s, request, each.output_len)

    def then(self, request_id: str, now: float) -> Arrival | None:
        return None

    def refused(self, request_id: str, now: float) -> Arrival | None:
        return None


class Traced:
    """Requests of a trace. `rate_per_s` scales its times to this mean rate; None keeps them."""

    def __init__(self, trace: Trace, vocab_size: int, rate_per_s: float | None = None) -> None:
        independent = [each for each in trace.requests if each.follows is None]
        span_s = max(each.at_s for each in independent)
        own_rate = len(independent) / span_s if span_s else math.inf
        self.name = f"{trace.format}'s trace"
        self.num = len(trace.requests)
        self.rate_per_s = own_rate if rate_per_s is None else rate_per_s
        scale = 1.0 if rate_per_s is None or math.isinf(own_rate) else own_rate / rate_per_s
        self._vocab_size = vocab_size
        self._requests = [
            each if each.follows is not None else replace(each, at_s=each.at_s * scale)
            for each in trace.requests
        ]
        self._next = {
            str(each.follows): i
            for i, each in enumerate(self._requests)
            if each.follows is not None
        }

    def arrivals(self) -> Iterator[Incoming]:
        independent = [i for i, each in enumerate(self._requests) if each.follows is None]
        for i in sorted(independent, key=lambda i: self._requests[i].at_s):
            yield self._arrival(i, self._requests[i].at_s)

    def then(self, request_id: str, now: float) -> Arrival | None:
        i = self._next.get(request_id)
        return None if i is None else self._arrival(i, now + self._requests[i].at_s)

    def refused(self, request_id: str, now: float) -> Arrival | None:
        """Return the next request of the session, as after an answer."""
        return self.then(request_id, now)

    def _arrival(self, i: int, at_s: float) -> Arrival:
        each: TraceRequest = self._requests[i]
        prompt = token_ids_of(each.prompt, self._vocab_size)
        return Arrival(at_s, simulated_request(str(i), prompt, None, each.tenant), each.num_output)


def synthetic(options: argparse.Namespace, model: ModelConfig, load: Load) -> Synthetic:
    """Draw the requests that the options describe. Raises ConfigError."""
    tokens = LocalTokens(model.model, model.tokenizer, model.revision)
    drawn = make_requests(options, tokens, load.seed)
    requests = [
        replace(each, prompt=tokens.encode(each.prompt)) if isinstance(each.prompt, str) else each
        for each in drawn
    ]
    return Synthetic(options.dataset_name, requests, load, options.tenants)

"""Compare a simulation with the engine, by three workloads that the calibration did not use.

    python -m benchmarks.scheduler.fidelity [--models demo] [--seconds 20] [--rounds 3]

An engine with the model is calibrated (`quire bench calibrate`: random batches). Then requests
arrive at a real engine: evenly (Poisson), in bursts (gamma, shape 0.2), and with shared prefixes.
The same requests arrive at the simulated core with the fitted step times. Real runs are repeated
with the same requests; their medians count, and their spread is shown. Times run from a request's
due time, so that waiting for the step in progress counts in both.

Aims: throughput within 10 %, mean and median time to the first token within 15 %, the 99th
percentile within the spread of the real runs.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.result_files import columns, options_of, write
from quire.base.clock import FakeClock, MonotonicClock
from quire.base.messages import Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.runner.memory_plan import available_cpu_bytes
from quire.serve.python.llm import LLM
from quire.tools.bench.calibrate import calibrate
from quire.tools.devices import CPU, Device
from quire.tools.report import benchmark_parser, print_head
from quire.tools.simulate.arrivals import Arrival
from quire.tools.simulate.build import Engines
from quire.tools.simulate.run import Run, run_all
from quire.tools.simulate.served import Listener, Served
from quire.tools.sizing.fit import fit
from quire.tools.step_fitting import Fitted, lines_of
from quire.tools.workloads import token_ids_of

MILLISECONDS = 1e3
POOL_BYTES = 256 << 20
MAX_LEN, MAX_SEQS = 1024, 64
WORKLOADS = ("steady", "bursty", "shared prefixes")
BURSTY = 0.2
NUM_PREFIXES = 4
AIMS = {"tokens/s": 0.10, "TTFT mean": 0.15, "TTFT median": 0.15}


@dataclass(frozen=True)
class Size:
    """The load of a model: requests per second, and the maximum number of tokens of a request's
    parts."""

    rate_per_s: float
    prompt: int
    output: int
    prefix: int
    calibrate_s: float


SIZES = {
    "demo": Size(25.0, 256, 96, 256, 30.0),
    "shape:qwen3-0.6b": Size(1.6, 96, 48, 128, 60.0),
}


@dataclass(frozen=True)
class Outcome:
    """Of one run: output tokens per second, and milliseconds."""

    tokens_per_s: float
    ttft_mean: float
    ttft_median: float
    ttft_p99: float
    tpot_mean: float

    @classmethod
    def of(cls, served: Sequence[Served], began_s: float) -> "Outcome":
        waits = MILLISECONDS * np.array([each.wait_s for each in served])
        lasts_s = max(each.finished_s for each in served) - began_s
        return cls(
            sum(each.num_output for each in served) / lasts_s,
            float(waits.mean()),
            float(np.median(waits)),
            float(np.quantile(waits, 0.99)),
            MILLISECONDS * statistics.mean(each.tpot_s for each in served),
        )

    @property
    def shown(self) -> dict[str, float]:
        return {
            "tokens/s": self.tokens_per_s,
            "TTFT mean": self.ttft_mean,
            "TTFT median": self.ttft_median,
            "TTFT p99": self.ttft_p99,
            "TPOT mean": self.tpot_mean,
        }


def arrivals_of(workload: str, size: Size, seconds: float, vocab_size: int) -> list[Arrival]:
    """Draw the requests of a workload, in the order in which they come."""
    rng = np.random.default_rng(WORKLOADS.index(workload) + 1)
    num = max(4, round(size.rate_per_s * seconds))
    shape = BURSTY if workload == "bursty" else 1.0
    gaps = rng.gamma(shape, 1.0, num)
    times = gaps.cumsum() * seconds / gaps.sum()
    found = []
    for number, at_s in enumerate(times.tolist()):
        parts = [(number + 1000, int(rng.integers(8, size.prompt)))]
        if workload == "shared prefixes":
            parts.insert(0, (int(rng.integers(NUM_PREFIXES)), size.prefix))
        num_output = int(rng.integers(4, size.output))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_output,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = token_ids_of(parts, vocab_size)
        found.append(Arrival(at_s, Request(str(number), tokens, params, seed=0), num_output))
    return found


class RealEngine:
    """An engine that serves requests when they are due, one workload after the other."""

    def __init__(self, llm: LLM) -> None:
        self._client = llm.engine.client
        self._by_id: dict[str, Served] = {}
        self._listener = Listener(self._client.core.scheduler, 0, self._by_id)
        self._client.core.subscribe(self._listener)

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Serve them, with an empty prefix cache to begin with."""
        client, clock = self._client, MonotonicClock()  # which the engine's times are of
        client.reset_prefix_cache()
        self._by_id.clear()
        gc.collect()
        began_s, waiting = clock.now(), list(reversed(arrivals))
        while waiting or client.num_unfinished:
            now = clock.now() - began_s
            while waiting and waiting[-1].at_s <= now:
                arrival = waiting.pop()
                served = Served(began_s + arrival.at_s, len(arrival.request.prompt_token_ids))
                self._listener.begin(arrival.request.request_id, served)
                client.add(arrival.request)
            if client.num_unfinished:
                client.advance()
            else:
                time.sleep(max(0.0, waiting[-1].at_s - (clock.now() - began_s)))
        return Outcome.of(list(self._by_id.values()), began_s)


def run_simulated(engines: Engines, times: Fitted, arrivals: Sequence[Arrival]) -> Outcome:
    """Serve them by the simulated core."""
    clock, run = FakeClock(), Run()
    run_all(engines.replicas(1, times, clock, run), arrivals, clock, run)
    return Outcome.of(list(run.by_id.values()), 0.0)


def settings_of(model: str, **more: Any) -> dict[str, Any]:
    dummy = {"load_format": "dummy"} if model.startswith("shape:") else {}
    return {
        "model": model,
        "kv_cache_memory_bytes": POOL_BYTES,
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_SEQS,
        "disable_log_stats": True,
        **dummy,
        **more,
    }


def measure(model: str, seconds: float, rounds: int, share: float) -> list[dict[str, Any]]:
    """Compare all workloads on a model; returns what stands in the report. share: of the time to
    calibrate, for a short try."""
    size = SIZES[model]
    with LLM(**settings_of(model, enable_prefix_caching=False)) as llm:
        times = calibrate(llm, model, share * size.calibrate_s, 0)
    print("\n".join(lines_of(times)), flush=True)
    requested = config_from_flat(**settings_of(model))
    found = fit(requested, resolve_model(model), Device(CPU, CPU, available_cpu_bytes()))
    engines = Engines.of(found, requested)
    results = []
    with LLM(**settings_of(model)) as llm:
        vocab_size = llm.engine.spec.vocab_size
        engine = RealEngine(llm)
        engine.run(arrivals_of("steady", size, 2.0, vocab_size))  # warms up
        for workload in WORKLOADS:
            arrivals = arrivals_of(workload, size, seconds, vocab_size)
            real = [engine.run(arrivals) for _ in range(rounds)]
            simulated = run_simulated(engines, times, arrivals)
            results.append(compare(model, workload, real, simulated))
    return results


def compare(model: str, workload: str, real: list[Outcome], simulated: Outcome) -> dict[str, Any]:
    """Print one workload's lines; returns what stands in the report."""
    result: dict[str, Any] = {"model": model, "workload": workload, "simulated": asdict(simulated)}
    result["real"] = [asdict(each) for each in real]
    print(f"{model}, {workload}\n                    real (least to most)        simulated    off")
    for name, ours in simulated.shown.items():
        values = [each.shown[name] for each in real]
        middle = statistics.median(values)
        off = ours / middle - 1
        aim = AIMS.get(name)
        is_met = abs(off) <= aim if aim else min(values) <= ours <= max(values)
        verdict = "" if name == "TPOT mean" else "  met" if is_met else "  NOT met"
        print(
            f"  {name:12} {middle:10.2f} ({min(values):.2f} to {max(values):.2f})"
            f" {ours:14.2f} {off:+7.1%}{verdict}",
            flush=True,
        )
        result.setdefault("off", {})[name] = off
        result.setdefault("spread", {})[name] = (min(values), middle, max(values))
    return result


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the time to calibrate")
    options = parser.parse_args()
    print_head("simulated and real runs; times in ms")
    results = []
    for model in options.models:
        results += measure(model, options.seconds, options.rounds, options.share)
    rows = [{**got, "real": columns(got["real"])} for got in results]
    write(options.output_json, "scheduler.fidelity", rows, options_of(options) | {"aims": AIMS})


if __name__ == "__main__":
    main()

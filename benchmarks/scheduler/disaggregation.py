"""Goodput of a prefill and a decode engine against two mixed ones, in virtual time.

    python -m benchmarks.scheduler.disaggregation

Each pair of lengths, prompt and answer, is served at rising rates by three pairs of engines on two
GPUs: `1 + 1` (prompts by one, answers by the other, blocks over a link of --link-gb-per-s), `2
mixed` and `2 mixed, small chunks`. The second has the engine's own settings. Steps of the third
take --small-chunk tokens at most, so that answers wait less for prompts. The goodput is the best
rate of requests per second that keep both limits: --ttft-ms to the first token, --tpot-ms for each
token after it. Schedulers, stores and memory are production's; step times come from the data sheet.
The numbers are the same on any machine, however busy.
"""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.result_files import options_of, write
from quire.base.settings.config import EngineConfig, config_from_flat
from quire.cli.model_files import find_config
from quire.serve.processes.progress import CountBar
from quire.tools.devices import find_gpu
from quire.tools.report import benchmark_parser, print_head
from quire.tools.simulate.arrivals import Arrival, simulated_request
from quire.tools.simulate.build import Engines
from quire.tools.simulate.command import simulate_work
from quire.tools.simulate.handover import Roles
from quire.tools.simulate.results import served_well
from quire.tools.simulate.roofline import roofline_of
from quire.tools.simulate.run import Run
from quire.tools.sizing.fit import fit
from quire.tools.workloads import FIRST_WORD

LENGTHS = ("8192x128", "4096x256", "1024x256", "256x512")
SPREAD = 0.25  # of lengths, up and down
MS = 1e3


@dataclass
class Drawn:
    """Requests of about these lengths that come one by one, as a Poisson process."""

    num_prompt: int
    num_output: int
    num: int
    rate_per_s: float
    name = "drawn"

    def arrivals(self) -> "list[Arrival]":
        rng = np.random.default_rng(1)
        at_s = np.cumsum(rng.exponential(1 / self.rate_per_s, self.num))
        found = []
        for i in range(self.num):
            low, high = 1 - SPREAD, 1 + SPREAD
            prompt = rng.integers(FIRST_WORD, 30_000, int(self.num_prompt * rng.uniform(low, high)))
            request = simulated_request(str(i), prompt.tolist(), None)
            num = int(self.num_output * rng.uniform(low, high))
            found.append(Arrival(float(at_s[i]), request, num))
        return found

    def then(self, request_id: str, now: float) -> None:
        return None

    refused = then


@dataclass(frozen=True)
class Limits:
    ttft_ms: float
    tpot_ms: float


def goodput(run: Run, limits: Limits) -> float:
    """Return the requests per second that keep both limits, while requests arrive."""
    done = served_well(run)
    good = sum(
        each.wait_s * MS <= limits.ttft_ms and each.tpot_s * MS <= limits.tpot_ms for each in done
    )
    span_s = max(each.arrived_s for each in done)
    return good / span_s


def serve(config: EngineConfig, roles: Roles | None, work: Drawn, device: str) -> Run:
    found = fit(config, find_config(config.model), find_gpu(device))
    engines, times = Engines.of(found, config), roofline_of(found)
    with CountBar(work.num, enabled=False) as bar:
        return simulate_work(engines, times, work, 2, bar, roles).run  # type: ignore[arg-type]


def compare(options: argparse.Namespace, lengths: str) -> dict[str, Any]:
    """Return the results of one line: for each system its goodput by rate."""
    num_prompt, num_output = map(int, lengths.split("x"))
    plain = {"model": options.model}
    small = {**plain, "max_num_batched_tokens": options.small_chunk}
    roles = Roles(1, 1, options.link_gb_per_s * 1e9)
    systems = {
        "1 + 1": (plain, roles),
        "2 mixed": (plain, None),
        "2 mixed, small chunks": (small, None),
    }
    limits = Limits(options.ttft_ms, options.tpot_ms)
    found: dict[str, dict[float, float]] = {}
    for name, (settings, own) in systems.items():
        config, by_rate = config_from_flat(**settings), dict[float, float]()
        rate, best = options.first_rate, 0.0
        while rate <= options.last_rate:
            work = Drawn(num_prompt, num_output, options.num_prompts, rate)
            by_rate[rate] = goodput(serve(config, own, work, options.device), limits)
            best = max(best, by_rate[rate])
            if by_rate[rate] < 0.6 * best:  # it only gets worse
                break
            rate = round(rate * options.growth, 3)
        found[name] = by_rate
    return {"lengths": lengths, "goodput_by_rate": found}


def print_line(line: dict[str, Any]) -> None:
    best = {name: max(rates.values()) for name, rates in line["goodput_by_rate"].items()}
    mixed = max(value for name, value in best.items() if name != "1 + 1")
    share = best["1 + 1"] / mixed if mixed else math.inf
    cells = "".join(f"{value:>23.2f}" for value in best.values())
    print(f"{line['lengths']:>10}{cells}{share:>18.2f}", flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="shape:qwen3-8b")
    parser.add_argument("--device", default="H200")
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, metavar="PROMPTxANSWER")
    parser.add_argument("--num-prompts", type=int, default=150)
    parser.add_argument("--first-rate", type=float, default=2.0)
    parser.add_argument("--last-rate", type=float, default=64.0)
    parser.add_argument("--growth", type=float, default=1.4)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--small-chunk", type=int, default=512)
    parser.add_argument("--link-gb-per-s", type=float, default=50.0)
    options = parser.parse_args()
    print_head(
        f"{options.model} on two {options.device}: requests per second with the first token within"
        f" {options.ttft_ms:g} ms and {options.tpot_ms:g} ms per token"
    )
    print(f"{'lengths':>10}{'1 + 1':>23}{'2 mixed':>23}{'2 mixed, small chunks':>23}"
          f"{'of the better':>18}")  # fmt: skip
    results = []
    for lengths in options.lengths:
        results.append(compare(options, lengths))
        print_line(results[-1])
    rows = [
        {"lengths": got["lengths"], "system": system, "rate_per_s": rate, "goodput_per_s": value}
        for got in results
        for system, rates in got["goodput_by_rate"].items()
        for rate, value in rates.items()
    ]
    write(options.output_json, "scheduler.disaggregation", rows, options_of(options))


if __name__ == "__main__":
    main()

"""The papers' mechanisms on this machine's CPU, with no simulation: one engine, several ways.

    python -m benchmarks.paper.measured [--rounds 2] [--only samples blocks] [--model demo]
        [--output-json benchmarks/results/MACHINE/paper_measured.json]

The model has the shape of Qwen3-0.6B and random weights; `demo` is small, for a short try.
Requests are there from the start, and have ShareGPT's lengths divided by 8. All cases of a group
have the same requests. Cases of a group alternate, and medians count.

`reservation`  paging, and admission by the paper's reservations (`reserving.py`; P 6.2)
`samples`      n samples of a prompt: tokens/s, and the share of blocks that they save (P 6.3)
`beams`        beam search, likewise
`prefix`       prompts that begin with the same 341 tokens, with and without the index (P 6.4)
`preemption`   recomputation and swapping in a pool that is too small (P 4.5, 7.3)
`blocks`       sizes of blocks in the same memory (P 7.2)

The head has this CPU's limits: bytes per second that it reads, and operations of products. A step
of one row reads the weights once, which no engine does faster. Some 20 minutes on two cores.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.paper.real import BLOCK_SIZE, POLICIES, pool_bytes
from benchmarks.paper.reserving import Reserving, install
from benchmarks.result_files import options_of, write
from quire.base.events import Event, Planned, Preempted, Stepped
from quire.base.requests.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.serve.python.llm import LLM
from quire.tools.limits import measure_limits
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import Lengths, Workload

MODEL, DEMO = "shape:qwen3-0.6b", "demo"
MAX_LEN, NUM_SLOTS = 512, 3920  # as many chunks as P table 1: 7.7 of the full length
SMALL_POOL = 0.14  # of these slots, so that requests preempt each other
EIGHTH = Workload("ShareGPT-like / 8", Lengths(20.2, 1.2, 4, 128), Lengths(42.2, 0.9, 4, 128))
PREFIX = 341  # tokens of five examples (P 6.4)
GROUPS = ("reservation", "samples", "beams", "prefix", "preemption", "blocks")


@dataclass(frozen=True)
class Case:
    """One way of a group. num: of requests; n: samples or beams of each."""

    group: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    num: int = 24
    n: int = 1
    is_beams: bool = False
    prefix: int = 0
    pool_share: float = 1.0


def cases(groups: list[str]) -> list[Case]:
    """Return the cases of these groups."""
    found = [
        *(Case("reservation", name, {"scheduling_policy": p}) for p, name in POLICIES.items()),
        *(Case("samples", f"{n}", {}, 6, n) for n in (1, 2, 4, 6)),
        *(Case("beams", f"{n}", {}, 3, n, True) for n in (2, 4, 6)),
        *(
            Case("prefix", name, {"enable_prefix_caching": on}, 12, prefix=PREFIX)
            for name, on in (("computed again", False), ("cached", True))
        ),
        *(
            Case("preemption", mode, {"preemption_mode": mode}, pool_share=SMALL_POOL)
            for mode in ("recompute", "swap")
        ),
        *(Case("blocks", f"{size}", {"block_size": size}) for size in (8, 16, 32, 64, 128)),
    ]
    return [each for each in found if each.group in groups]


@dataclass
class Meter:
    """Listens to an engine: rows of its steps, blocks with and without sharing, preemptions."""

    scheduler: Scheduler
    rows: dict[int, int] = field(default_factory=dict)
    rows_s: float = 0.0
    busy_s: float = 0.0
    num_used: int = 0
    num_unshared: int = 0
    num_preempted: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            running = self.scheduler.rows.sequences()
            self.rows[event.step_id] = event.num_rows
            self.num_unshared += sum(len(each.blocks.tables[0].live_blocks) for each in running)
            self.num_used += self.scheduler.memory.kv.pools[0].num_used
        elif isinstance(event, Stepped):
            self.rows_s += self.rows.pop(event.step_id, 0) * event.duration_s
            self.busy_s += event.duration_s
        elif isinstance(event, Preempted):
            self.num_preempted += 1


@dataclass(frozen=True)
class Found:
    """One run. batched: rows in a step, mean over time; saved: share of the blocks; cached: share
    of the prompts' tokens."""

    tokens_per_s: float
    batched: float
    saved: float
    cached: float
    num_preemptions: int


def requests(case: Case, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Draw prompts, and answers of given lengths."""
    rng = np.random.default_rng(0)
    inputs, outputs = EIGHTH.sample(case.num, 0)
    shared = rng.integers(5, min(vocab_size, 1000), case.prefix).tolist()
    prompts = [
        shared + rng.integers(5, min(vocab_size, 1000), length).tolist()
        for length in np.minimum(inputs, MAX_LEN - case.prefix - 128)
    ]
    params = [
        SamplingParams(
            n=case.n,
            temperature=0.0 if case.n == 1 else 1.0,
            use_beam_search=case.is_beams,
            max_tokens=length,
            ignore_eos=True,
            seed=0,
        )
        for length in outputs.tolist()
    ]
    return prompts, params


def measure(case: Case, model: str = MODEL) -> Found:
    """Answer all requests of a case."""
    Reserving.num_slots, Reserving.max_model_len = NUM_SLOTS, MAX_LEN
    settings = {"block_size": BLOCK_SIZE, "enable_prefix_caching": False} | case.settings
    if model.startswith("shape:"):
        settings["load_format"] = "dummy"
    with LLM(
        model=model,
        max_model_len=MAX_LEN,
        max_num_seqs=128,
        kv_cache_memory_bytes=int(case.pool_share * pool_bytes(model)),
        disable_log_stats=True,
        **settings,
    ) as llm:
        prompts, params = requests(case, llm.engine.spec.vocab_size)
        warm = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        llm.generate([[7] * 16] * 4, warm, use_tqdm=False)
        core = llm.engine.client.core
        meter = Meter(core.scheduler)
        core.subscribe(meter)
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - began_s
    num_tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    cached = sum(max(0, output.num_cached_tokens or 0) for output in outputs)
    return Found(
        num_tokens / took_s,
        meter.rows_s / meter.busy_s,
        1 - meter.num_used / max(1, meter.num_unshared),
        cached / sum(map(len, prompts)),
        meter.num_preempted,
    )


def limits_of_machine() -> dict[str, float]:
    """Measure and print what this CPU reads and multiplies at most."""
    found = measure_limits(torch.bfloat16, torch.device("cpu"))
    read, products = found.bytes_per_s / 1e9, found.flops_per_s / 1e9
    print(f"# this machine reads {read:.1f} GB/s and multiplies at {products:.0f} GFLOP/s (bf16)")
    return {"limit_gb_per_s": read, "limit_gflop_per_s": products}


def rows_of(chosen: list[Case], rounds: int, model: str) -> Iterator[dict[str, Any]]:
    """Measure the cases in alternating rounds, group by group; yield the lines of the report."""
    for group in dict.fromkeys(case.group for case in chosen):
        mine = [case for case in chosen if case.group == group]
        found: list[list[Found]] = [[] for _ in mine]
        for _ in range(rounds):
            for case, runs in zip(mine, found, strict=True):
                runs.append(measure(case, model))
        for case, runs in zip(mine, found, strict=True):
            rates = [each.tokens_per_s for each in runs]
            first, rate = runs[0], statistics.median(rates)
            print(
                f"{group:12} {case.name:14} {rate:9.1f} {first.batched:8.1f}"
                f" {first.saved:8.1%} {first.cached:8.1%} {first.num_preemptions:6}",
                flush=True,
            )
            yield {
                "group": group, "case": case.name, "requests": case.num, "tokens_per_s": rate,
                "tokens_per_s_of_rounds": rates, "batched": first.batched, "saved": first.saved,
                "cached": first.cached, "preemptions": first.num_preemptions,
            }  # fmt: skip


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--model", choices=(MODEL, DEMO), default=MODEL)
    options = parser.parse_args()
    print_head(f"the papers' mechanisms, {options.model} in bf16, a pool of {NUM_SLOTS:,} tokens")
    limits = limits_of_machine()
    print("group        case            tokens/s  batched    saved   cached  preempted")
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        sys.path.append(folder)
        results = list(rows_of(cases(options.only), options.rounds, options.model))
    write(options.output_json, "paper.measured", results, options_of(options) | limits)


if __name__ == "__main__":
    main()

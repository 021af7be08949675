"""Paging against reserving, for real: one engine on this machine's CPU, four ways to admit.

    python -m benchmarks.paper.real [--rounds 3] [--output-json benchmarks/results/paper_real.json]

The models are the demo model, and the shape of Qwen3-0.6B with random weights. The pool is as
small, against the longest sequence, as OPT-13B's on an A100 (P table 1: 7.7 sequences of 2,048
tokens). Lengths are ShareGPT's; both are divided by 4. All requests are there from the start.
Rounds alternate; medians count. Tokens are the same in all four, since batches change no bit of
them.
"""

import statistics
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.reserving import NAMES, Reserving, install
from benchmarks.result_files import options_of, write
from quire.base.events import Event, Planned, Preempted, Stepped
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import config_from_flat
from quire.models.checkpoint.source import resolve_model
from quire.serve.python.llm import LLM
from quire.tools.devices import CPU, Device
from quire.tools.report import benchmark_parser, print_head
from quire.tools.sizing.fit import fit
from quire.tools.workloads import Lengths, Workload

MODELS = {"demo": 160, "shape:qwen3-0.6b": 48}  # with so many requests
POLICIES = {"fifo": "quire", **{name: f"Orca ({NAMES[name]})" for name in NAMES}}
MAX_LEN, NUM_SLOTS, BLOCK_SIZE = 512, 3920, 16
QUARTER = Workload("ShareGPT-like / 4", Lengths(40.3, 1.2, 4, 256), Lengths(84.5, 0.9, 4, 256))


@dataclass
class Meter:
    """Listens to an engine: rows of its steps, and how long they took."""

    rows: dict[int, int] = field(default_factory=dict)
    rows_s: float = 0.0
    busy_s: float = 0.0
    preempted: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self.rows[event.step_id] = event.num_rows
        elif isinstance(event, Stepped):
            self.rows_s += self.rows.pop(event.step_id) * event.duration_s
            self.busy_s += event.duration_s
        elif isinstance(event, Preempted):
            self.preempted += 1


@dataclass(frozen=True)
class Found:
    """One run. batched: requests in a step, mean over time."""

    model: str
    policy: str
    tokens_per_s: float
    batched: float
    num_preemptions: int
    digest: int


def requests(num: int, seed: int, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Draw prompts, and answers of given lengths."""
    rng = np.random.default_rng(seed)
    inputs, outputs = QUARTER.sample(num, seed)
    prompts = [rng.integers(5, min(vocab_size, 1000), length).tolist() for length in inputs]
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        for length in outputs.tolist()
    ]
    return prompts, params


def pool_bytes(model: str) -> int:
    """Return the bytes of a pool of NUM_SLOTS."""
    config = config_from_flat(model=model, max_model_len=MAX_LEN)
    found = fit(config, resolve_model(model), Device(CPU, CPU, 16 << 30))
    return NUM_SLOTS // BLOCK_SIZE * sum(group.block_bytes for group in found.groups)


def measure(model: str, policy: str, num: int) -> Found:
    """Answer all requests by an engine with a policy."""
    Reserving.num_slots, Reserving.max_model_len = NUM_SLOTS, MAX_LEN
    settings: dict[str, Any] = {} if model == "demo" else {"load_format": "dummy"}
    with LLM(
        model=model,
        scheduling_policy=policy,
        max_model_len=MAX_LEN,
        max_num_seqs=128,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=pool_bytes(model),
        enable_prefix_caching=False,
        disable_log_stats=True,
        **settings,
    ) as llm:
        prompts, params = requests(num, 0, llm.engine.spec.vocab_size)
        llm.generate(prompts[:8], params[:8], use_tqdm=False)  # warms up
        meter = Meter()
        llm.engine.client.core.subscribe(meter)
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - began_s
    token_ids = [output.outputs[0].token_ids for output in outputs]
    digest = zlib.crc32(np.concatenate([np.asarray(ids, np.int32) for ids in token_ids]).tobytes())
    num_tokens = sum(map(len, token_ids))
    return Found(
        model, policy, num_tokens / took_s, meter.rows_s / meter.busy_s, meter.preempted, digest
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--share", type=float, default=1.0, help="of the requests, for a short try")
    options = parser.parse_args()
    print_head(
        f"paging against reserving; a pool of {NUM_SLOTS:,} tokens, of {MAX_LEN} at most each"
    )
    print("model                policy          tokens/s   requests in a step")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        sys.path.append(folder)
        for model in options.models:
            results += compare(model, max(8, int(options.share * MODELS[model])), options.rounds)
    write(options.output_json, "paper.real", results, options_of(options))


def compare(model: str, num: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all policies in alternating rounds; returns what stands in the report."""
    found: dict[str, list[Found]] = {policy: [] for policy in POLICIES}
    for _ in range(rounds):
        for policy, mine in found.items():
            mine.append(measure(model, policy, num))
    digests = {each.digest for mine in found.values() for each in mine}
    results = []
    for policy, mine in found.items():
        rates = [each.tokens_per_s for each in mine]
        rate, batched = statistics.median(rates), statistics.median(e.batched for e in mine)
        print(f"{model:20} {POLICIES[policy]:14} {rate:9.1f} {batched:14.1f}", flush=True)
        results.append(
            {
                "model": model,
                "system": POLICIES[policy],
                "requests": num,
                "tokens_per_s": rate,
                "tokens_per_s_of_rounds": rates,
                "batched": batched,
                "preemptions": mine[0].num_preemptions,
                "same_tokens": len(digests) == 1,
            }
        )
    return results


if __name__ == "__main__":
    main()

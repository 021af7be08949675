r"""Measure what draft tokens gain: the same requests with and without them, in pairs.

    python -m benchmarks.models.speculation
    python -m benchmarks.models.speculation --method ngram --rows 1 4
    python -m benchmarks.models.speculation --replay shape:qwen3-0.6b --minutes 8

Both engines live in one process. Where an engine's memory lies changes its speed by a percent or
two, so they are built twice, in either order. A pair is one run with and one without drafts; the
first of them alternates. All answers are compared, token by token. `drafts/workloads.py` describes
the requests.

--replay measures another model, whose weights may be random. Its drafts repeat the acceptance of
the demo model's drafts, place by place (`drafts/record.py`). A round times one plain run, and one
run for each workload. Masks of grammars are not part of it.

A cell's ratio is the median of its pairs: the time without drafts divided by the time with them.
The interval holds the median in 95 % of cases: the pairs' order statistics by the sign test, which
assumes no distribution. A cell is slower if its interval ends below 0.99. With fewer than six pairs
it spans all of them, and there is no verdict. Each cell gets its share of --minutes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Any

from benchmarks.models.drafts import replay
from benchmarks.models.drafts.engines import PLAIN, MeasuredEngine, TimedRun
from benchmarks.models.drafts.record import REPLAYED, Record, Replayed, record_of
from benchmarks.models.drafts.workloads import DraftRequest, Workloads
from benchmarks.result_files import options_of, write
from quire import SamplingParams
from quire.render.renderer import RenderedPrompt
from quire.tools.report import benchmark_parser, print_head

LIMIT, ERROR = 0.99, 0.05
MIN_PAIRS = 6  # with fewer, no interval holds the median in 95 % of cases
WORKLOADS = ("copying", "tools", "json", "prose", "code edits", "random")
NUM_ROWS = (1, 4, 16, 64, 256)
REPLAYED_ROWS = (1, 4, 16)
METHODS = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "forced": {"method": "forced"},
}
NUM_RECORDS = 16
PROMPT = 32  # tokens of a prompt of a replay
MAX_LEN = 512
ORDERS = (False, True)  # whether the engine with drafts is built first


@dataclass
class Cell:
    """Pairs of one workload and number of rows."""

    workload: str
    rows: int
    plain: list[TimedRun] = field(default_factory=list)
    drafted: list[TimedRun] = field(default_factory=list)

    def add(self, plain: TimedRun, drafted: TimedRun) -> None:
        assert plain.answers == drafted.answers, f"{self.workload}: a draft has changed an answer"
        self.plain.append(plain)
        self.drafted.append(drafted)

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.plain, self.drafted, strict=True)
        return [plain.seconds / drafted.seconds for plain, drafted in pairs]

    def figures(self) -> dict[str, Any]:
        """Return the row of the result file."""
        low, high = interval(self.ratios)
        return {
            "workload": self.workload, "rows": self.rows,
            "ratio": statistics.median(self.ratios), "low": low, "high": high,
            "verdict": verdict(len(self.ratios), high), "pairs": len(self.ratios),
            "tokens_per_s": statistics.median(r.num_tokens / r.seconds for r in self.plain),
            "tokens_per_step": self._total("num_tokens") / self._total("num_steps") / self.rows,
            "drafted": self._total("num_drafted"), "accepted": self._total("num_accepted"),
        }  # fmt: skip

    def _total(self, name: str) -> int:
        return sum(getattr(run, name) for run in self.drafted)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median by the sign test; all ratios if there are too few."""
    num, tail, cut = len(ratios), 0.0, 0
    while cut < num / 2:
        tail += comb(num, cut) / 2**num
        if 2 * tail > ERROR:
            break
        cut += 1
    ordered, outer = sorted(ratios), max(cut, 1)
    return ordered[outer - 1], ordered[num - outer]


def verdict(num: int, high: float) -> str:
    """Return what the interval of so many pairs says about the limit."""
    if num < MIN_PAIRS:
        return "too few pairs"
    return "slower" if high < LIMIT else "not slower"


def shares(cells: Sequence[Cell], seconds: float) -> Iterator[tuple[Cell, float]]:
    """Return each cell and the time at which its measurement ends. Many rows take longer."""
    began, weights = time.perf_counter(), [1 + cell.rows / 64 for cell in cells]
    for number, cell in enumerate(cells, start=1):
        yield cell, began + seconds * sum(weights[:number]) / sum(weights)


def measure_demo(options: argparse.Namespace) -> Iterator[Cell]:
    """Measure all cells of the demo model, half of the time with either engine built first."""
    cells = [Cell(name, num) for num in options.rows for name in options.workloads]
    for drafts_first in ORDERS:
        plain, drafting = demo_engines(options, drafts_first)
        workloads = Workloads(plain.engine)
        for cell, end_s in shares(cells, 60 * options.minutes / len(ORDERS)):
            measure_pairs(cell, end_s, plain, drafting, workloads)
        plain.close()
        drafting.close()
    yield from cells


def measure_pairs(
    cell: Cell, end_s: float, plain: MeasuredEngine, drafting: MeasuredEngine, workloads: Workloads
) -> None:
    """Add pairs to a cell until a time, and at least one."""
    number, longest_s = 0, 0.0
    while number < 2 or time.perf_counter() + longest_s < end_s:
        began = time.perf_counter()
        requests = workloads.requests(cell.workload, number, cell.rows)
        engines = (plain, drafting) if number % 2 else (drafting, plain)
        for engine in engines:
            engine.compute_prompts(requests)
        found = {id(engine): engine.run(requests) for engine in engines}
        if number > 0:  # the first pair warms up
            cell.add(found[id(plain)], found[id(drafting)])
        longest_s = time.perf_counter() - began
        number += 1


def demo_engines(
    options: argparse.Namespace, drafts_first: bool
) -> tuple[MeasuredEngine, MeasuredEngine]:
    """Return an engine without drafts and one with them, built in this order or the other."""
    settings = {
        "model": "demo", "dtype": options.dtype, "max_model_len": MAX_LEN,
        "max_num_seqs": max(options.rows), "kv_cache_memory_bytes": options.kv_mib << 20,
    }  # fmt: skip
    configs = (PLAIN, speculation(options))[:: -1 if drafts_first else 1]
    engines = [MeasuredEngine.build(each, **settings) for each in configs]
    plain, drafting = engines[:: -1 if drafts_first else 1]
    return plain, drafting


def speculation(options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] | None = options.speculative_config
    return METHODS[options.method] if given is None else given


# ---- replays -------------------------------------------------------------------------------------


def measure_replay(options: argparse.Namespace) -> Iterator[Cell]:
    """Measure all cells of another model, with the acceptance of the demo model's drafts."""
    records = demo_records(options)
    config = {"method": f"{Path(replay.__file__)}:Replay", "num_speculative_tokens": 32}
    settings = {
        "model": options.replay, "dtype": options.dtype, "quantization": options.quantization,
        "max_model_len": MAX_LEN, "max_num_seqs": max(options.rows),
        "kv_cache_memory_bytes": options.kv_mib << 20,
    }  # fmt: skip
    plain, drafting = (MeasuredEngine.build(each, **settings) for each in (PLAIN, config))
    firsts = [[Cell(name, num) for name in options.workloads] for num in options.rows]
    leads = [cells[0] for cells in firsts]
    for (lead, end_s), cells in zip(shares(leads, 60 * options.minutes), firsts, strict=True):
        requests = replay_requests(lead.rows, options.tokens)
        for engine in (plain, drafting):
            engine.compute_prompts(requests)
        answers = plain.run(requests).answers
        number, longest_s = 0, 0.0
        while number < 2 or time.perf_counter() + longest_s < end_s:
            began = time.perf_counter()
            one_round(cells, number, (plain, drafting), requests, answers, records)
            longest_s = time.perf_counter() - began
            number += 1
        yield from cells
    plain.close()
    drafting.close()


def one_round(
    cells: Sequence[Cell],
    number: int,
    engines: tuple[MeasuredEngine, MeasuredEngine],
    requests: Sequence[DraftRequest],
    answers: list[list[int]],
    records: dict[str, list[Record]],
) -> None:
    """Time a plain run and one run of each cell, from another cell on in each round."""
    plain, drafting = engines
    turned = [*cells[number % len(cells) :], *cells[: number % len(cells)]]
    found: dict[str, TimedRun] = {}
    before = plain.run(requests) if number % 2 else None
    for cell in turned:
        replayed(cell, requests, answers, records[cell.workload], drafting)
        found[cell.workload] = drafting.run(requests)
    without = plain.run(requests) if before is None else before
    for cell in cells:
        cell.add(without, found[cell.workload])


def replayed(
    cell: Cell,
    requests: Sequence[DraftRequest],
    answers: list[list[int]],
    records: list[Record],
    drafting: MeasuredEngine,
) -> None:
    """Let the drafter propose as the records of a cell's workload say."""
    REPLAYED.clear()
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        ids, record = request.prompt.token_ids, records[i % len(records)]
        size = drafting.engine.spec.vocab_size
        REPLAYED[ids[0]] = Replayed(len(ids), answer, record, size)


def replay_requests(num: int, num_tokens: int) -> list[DraftRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [[i + 5, *(at * 37 % 1000 + 5 for at in range(PROMPT))] for i in range(num)]
    return [DraftRequest(RenderedPrompt(ids), params) for ids in prompts]


def demo_records(options: argparse.Namespace) -> dict[str, list[Record]]:
    """Return the records of each workload, of the demo model's drafter."""
    config = speculation(options)
    drafting = MeasuredEngine.build(
        config, model="demo", max_model_len=MAX_LEN, max_num_seqs=1, kv_cache_memory_bytes=32 << 20
    )
    workloads, found = Workloads(drafting.engine), dict[str, list[Record]]()
    for name in options.workloads:
        made = record_of(drafting, workloads.requests(name, 0, 2 * NUM_RECORDS))
        found[name] = made[NUM_RECORDS:]  # the first ones warm up
    drafting.close()
    return found


# --------------------------------------------------------------------------------------------------


def line_of(figures: dict[str, Any]) -> str:
    bounds = f"{figures['low']:.3f} to {figures['high']:.3f}"
    return (
        f"{figures['workload']:11}{figures['rows']:5}{figures['ratio']:8.3f}  {bounds:16}"
        f"{figures['verdict']:14}{figures['pairs']:5}{figures['tokens_per_s']:10.1f}"
        f"{figures['tokens_per_step']:8.2f}{figures['drafted']:9}{figures['accepted']:9}"
    )


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--replay", metavar="MODEL", help="measure this model by a replay")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None, help="of the model of a replay")
    parser.add_argument("--method", choices=list(METHODS), default="suffix")
    parser.add_argument("--speculative-config", type=json.loads, help="instead of it, as JSON")
    parser.add_argument("--rows", type=int, nargs="+", help="256 at most")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--minutes", type=float, default=5.5, help="for all cells together")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer of a replay")
    parser.add_argument("--kv-mib", type=int, default=512, help="of each engine")
    options = parser.parse_args()
    if options.rows is None:
        options.rows = list(REPLAYED_ROWS if options.replay else NUM_ROWS)
    if not all(1 <= num <= max(NUM_ROWS) for num in options.rows):
        parser.error(f"--rows are 1 to {max(NUM_ROWS)}, got {options.rows}")
    return options


def main() -> None:
    options = arguments()
    print_head(f"Draft tokens, {options.replay or 'demo'}, {speculation(options)}")
    print(
        "workload    rows   ratio  95 % interval   verdict       pairs  plain/s  tok/step  drafted"
    )
    rows = []
    for cell in (measure_replay if options.replay else measure_demo)(options):
        rows.append(cell.figures())
        print(line_of(rows[-1]), flush=True)
    write(options.output_json, "models.speculation", rows, options_of(options))


if __name__ == "__main__":
    main()

"""Host time of one scheduler step in steady decode, without a model.

    python benchmarks/scheduler_steps.py

All rows run, one token each per step; an executor without a model answers with random tokens. Timed
apart: schedule(), update(), the conversion of its result to messages (engine/core.py), and the
client's side that takes the messages in. `aligned`: all prompts have 128 tokens, so that all rows
enter a new block in the same steps, which the median does not see but the mean does. `spread`:
lengths of 113 to 128, so a sixteenth of the rows enters a new block in every step.

Beside them: vLLM 0.32's schedule() and update_from_output(), which makes its messages as well.
"""

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from quire.base.config import SchedulerConfig
from quire.engine.news import news_of
from quire.engine.output import OutputProcessor
from quire.scheduler.scheduler import Scheduler
from quire.tools.dry_run import VOCAB_SIZE, RandomExecutor, dry_request, dry_run
from quire.tools.report import benchmark_parser, print_head, write_report
from quire.tools.workloads import random_prompts

PROMPT_LEN = 128
BLOCK_SIZE = 16
VLLM = "vLLM 0.32 CPU wheel, 2-core EPYC Milan"
VLLM_MS = {  # (running, prefix caching): schedule, update
    (256, True): (2.65, 1.16),
    (256, False): (2.73, 1.05),
    (1024, True): (11.28, 5.00),
    (1024, False): (10.81, 4.30),
}
AIM_MS = {256: 0.4, 1024: 1.2}
PARTS = ("schedule", "update", "messages", "client")


@dataclass
class Times:
    """Milliseconds per step of each part."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def median(self, part: str) -> float:
        return statistics.median(self.parts[part])

    def mean(self, part: str) -> float:
        return statistics.mean(self.parts[part])

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            part: {"median": self.median(part), "mean": self.mean(part), "max": max(times)}
            for part, times in self.parts.items()
        }


def steady_decode(num_rows: int, num_steps: int, caching: bool, spread: bool) -> Times:
    """Admit all rows, let them decode for a while, then time each step."""
    max_len = PROMPT_LEN + num_steps + 32
    num_blocks = num_rows * (-(-max_len // BLOCK_SIZE) + 1)
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=num_rows * PROMPT_LEN)
    scheduler, executor = dry_run(num_blocks, BLOCK_SIZE, config, max_len, caching)
    client = OutputProcessor()
    prompts = random_prompts(num_rows, PROMPT_LEN, VOCAB_SIZE, seed=1)
    for i, prompt in enumerate(prompts):
        if spread:
            prompt = prompt[i % BLOCK_SIZE :]
        request = dry_request(str(i), prompt, max_tokens=max_len)
        scheduler.add(request, 0.0)
        client.add(request, None, None, 0.0)
    for _ in range(16):  # the first one computes all prompts
        _step(scheduler, executor, client, Times())
    gc.collect()  # what earlier runs left behind is not this run's
    times = Times()
    for _ in range(num_steps):
        _step(scheduler, executor, client, times)
    assert scheduler.num_running == num_rows, "a sequence ended or was preempted"
    return times


def _step(
    scheduler: Scheduler, executor: RandomExecutor, client: OutputProcessor, times: Times
) -> None:
    clock = time.perf_counter
    began = clock()
    plan = scheduler.schedule(0.0)
    planned = clock()
    assert plan is not None
    executor.submit(plan)
    result = executor.next_result()
    resulted = clock()
    outputs = scheduler.update(result, 0.0)
    updated = clock()
    messages = news_of(outputs).messages()
    sent = clock()
    client.process(messages, 0.0)
    taken = clock()
    scheduler.events.clear()
    spans = (planned - began, updated - resulted, sent - updated, taken - sent)
    for part, span in zip(PARTS, spans, strict=True):
        times.parts[part].append(span * 1e3)


def print_line(num_rows: int, caching: bool, spread: bool, times: Times) -> None:
    medians = " ".join(f"{times.median(part):9.3f}" for part in PARTS)
    both = times.median("schedule") + times.median("update")
    mean = times.mean("schedule") + times.mean("update")
    vllm = VLLM_MS.get((num_rows, caching))
    beside = (
        f"{sum(vllm):7.2f} {sum(vllm) / (both + times.median('messages')):6.1f}x" if vllm else ""
    )
    print(
        f"{num_rows:6,} {'on' if caching else 'off':>4} {'spread' if spread else 'aligned':>8}"
        f" {medians} {both:9.3f} {mean:9.3f} {AIM_MS.get(num_rows, float('nan')):6.1f} {beside}",
        flush=True,
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=208)
    options = parser.parse_args()
    print_head("scheduler steps in steady decode, milliseconds (medians; `mean` of s+u)")
    print(f"# beside them: {VLLM}; ratio of its two to our schedule + update + messages")
    print(
        "  rows cach  prompts " + " ".join(f"{part:>9}" for part in PARTS)
        + "       s+u  mean s+u    aim    vLLM"
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    for num_rows in options.rows:
        for caching in (True, False):
            for spread in (False, True):
                times = steady_decode(num_rows, options.steps, caching, spread)
                print_line(num_rows, caching, spread, times)
                results.append(
                    {
                        "rows": num_rows,
                        "prefix_caching": caching,
                        "prompts": "spread" if spread else "aligned",
                        "steps": options.steps,
                        "ms": times.summary(),
                        "vllm_ms": VLLM_MS.get((num_rows, caching)),
                    }
                )
    write_report(options.output_json, {"vllm": VLLM, "results": results})


if __name__ == "__main__":
    main()

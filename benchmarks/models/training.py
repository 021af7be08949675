"""Measure the cost of training: forward pass, step, update of the engine's weights, and its pause.

    python -m benchmarks.models.training [--model demo] [--samples 16] [--length 256]

The engine scores random prompts with `prompt_logprobs=0`, which takes the logits of all tokens. The
trainer's forward pass computes the same log-probabilities. A step is the forward pass, the backward
pass and one update by AdamW. transformers runs the same step in float32, on samples of one length
without padding. One process, alternating rounds, medians of CPU seconds and of wall seconds. The
numbers of differing log-probabilities are reported as well: 0 for the trainer.

An update gives the engine the trainer's tensors; a start opens an engine from the files. --pause
adds the longest time between two tokens of a stream while weights are updated, alongside the median
time between two tokens.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.result_files import Row, options_of, write
from quire import LLM, AsyncLLM, SamplingParams
from quire.models.checkpoint.source import resolve_model
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import random_prompts
from quire.training import TrainingModel

try:
    import transformers
except ImportError:
    transformers = None

Prompts = list[list[int]]
UPDATE, START = "engine update", "engine start"
UNCOUNTED = (UPDATE, START)  # works that compute no tokens
NUM_UPDATES = 4  # while a stream runs
STREAM_TOKENS = 1500
Work = Callable[[], torch.Tensor]  # returns the log-probabilities of all tokens but the first


def engine_work(llm: LLM, prompts: Prompts) -> Work:
    """Return the engine's scoring of prompts."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)

    def work() -> torch.Tensor:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = []
        outputs = llm.generate(requests, params, use_tqdm=False)
        for output, prompt in zip(outputs, prompts, strict=True):
            scores = output.prompt_logprobs or []
            pairs = zip(prompt[1:], scores[1:], strict=True)
            found += [each[token].logprob for token, each in pairs if each is not None]
        return torch.tensor(found)

    return work


def trainer_work(model: TrainingModel, prompts: Prompts) -> Work:
    """Return the trainer's forward pass."""
    firsts, others = [each[:1] for each in prompts], [each[1:] for each in prompts]
    return lambda: model(firsts, others)


def torch_work(model: Any, prompts: Prompts) -> Work:
    """Return the forward pass of transformers."""
    ids_SM = torch.tensor(prompts)

    def work() -> torch.Tensor:
        logprobs_SMV = model(ids_SM).logits[:, :-1].log_softmax(-1)
        found: torch.Tensor = logprobs_SMV.gather(-1, ids_SM[:, 1:, None]).flatten()
        return found

    return work


def step_of(model: torch.nn.Module, work: Work) -> Callable[[], object]:
    """Return a whole step of training."""
    # A learning rate so small that all rounds compute nearly the same numbers.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)

    def step() -> None:
        optimizer.zero_grad()
        (-work().mean()).backward()
        optimizer.step()

    return step


def without_gradients(work: Work) -> Callable[[], object]:
    """Return the forward pass alone."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return work()

    return forward


def measure(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median CPU and wall seconds of each work, run in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            cpu, wall = time.process_time(), time.perf_counter()
            work()
            if number:  # the first round warms up
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: {
            unit: statistics.median(column)
            for unit, column in zip(("cpu_s", "wall_s"), zip(*each, strict=True), strict=True)
        }
        for name, each in times.items()
    }


def engine_start(options: Any) -> Callable[[], object]:
    """Return a start of an engine from the files."""

    def start() -> None:
        LLM(options.model, dtype=options.dtype, disable_log_stats=True).close()

    return start


async def pauses_ms(options: Any, tensors: dict[str, torch.Tensor]) -> Row:
    """Return the times between two tokens of a stream while weights are updated."""
    params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True, temperature=0.0)
    times, updates = list[float](), list[tuple[float, float]]()
    async with await AsyncLLM.create(options.model, dtype=options.dtype) as llm:

        async def update() -> None:
            for _ in range(NUM_UPDATES):
                began = time.perf_counter()
                await llm.update_weights(tensors)
                updates.append((began, time.perf_counter()))

        updating = None
        async for output in llm.generate({"prompt_token_ids": [1]}, params):
            times.append(time.perf_counter())
            if updating is None and len(output.outputs[0].token_ids) >= STREAM_TOKENS // 10:
                updating = asyncio.create_task(update())
        assert updating is not None
        await updating
    gaps = [(end, 1e3 * (end - begin)) for begin, end in zip(times, times[1:], strict=False)]
    own = [[gap for end, gap in gaps if first < end <= last] for first, last in updates]
    return {
        "gap_ms": statistics.median(gap for _, gap in gaps),
        "longest_ms": [max(each, default=None) for each in own],  # the first update imports torch
        "gaps": sum(map(len, own)),
        "update_s": [end - began for began, end in updates],
    }


def rows_of(times: dict[str, dict[str, float]], num_tokens: int) -> list[Row]:
    """Return a row for each work, with tokens per CPU second if the work computes tokens."""
    return [
        {"work": name, **each}
        | ({} if name in UNCOUNTED else {"tokens_per_cpu_s": num_tokens / each["cpu_s"]})
        for name, each in times.items()
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine's weights")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", action="store_true", help="measure it; needs a quiet machine")
    options = parser.parse_args()
    if transformers is None:
        print("skipped: transformers is not installed (pip install transformers)", file=sys.stderr)
        return
    print_head(f"training: {options.model}, {options.samples} samples of {options.length} tokens")
    model = TrainingModel(options.model, dtype=options.dtype)
    path = str(resolve_model(options.model).directory)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = model.state_dict()
    settings = {"enable_prefix_caching": False, "max_model_len": options.length + 1}
    with LLM(options.model, dtype=options.dtype, disable_log_stats=True, **settings) as llm:
        size = llm.engine.spec.vocab_size
        prompts = random_prompts(options.samples, options.length, size, seed=0)
        engine, ours = engine_work(llm, prompts), trainer_work(model, prompts)
        theirs, scores = torch_work(plain, prompts), engine()
        with torch.no_grad():
            differ = {name: int((work() != scores).sum()) for name, work in
                      (("trainer", ours), ("torch", theirs))}  # fmt: skip
        times = measure(
            {
                "engine forward": engine,
                "trainer forward": without_gradients(ours),
                "torch forward": without_gradients(theirs),
                "trainer step": step_of(model, ours),
                "torch step": step_of(plain, theirs),
                UPDATE: lambda: llm.update_weights(tensors),
                START: engine_start(options),
            },
            options.rounds,
        )
    rows = rows_of(times, options.samples * options.length)
    if options.pause:
        rows.append({"work": "pause", **asyncio.run(pauses_ms(options, tensors))})
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    counts = {"compared": len(scores), "differ": differ}
    print(f"log-probabilities that differ from the engine's, of {len(scores)}: {differ}")
    write(options.output_json, "models.training", rows, options_of(options) | counts)


if __name__ == "__main__":
    main()

"""Measure the accuracy that number formats cost on a CPU, with the demo model on held-out items.

    python -m benchmarks.models.accuracy [--items 2000] [--formats int8 "int8 rows"] [--shape]

Every format runs in the engine as a user would run it, one after the other. It is compared with its
source formats: bfloat16 with float32, and quantised weights with plain ones of the same dtype and
with float32. Three things are measured.

Logits: of all tokens at the same positions of held-out text, without their mean, which has no
meaning. `relative` is the norm of the error over the reference's. KL is the divergence of the
next-token distributions, in nats. `same best` is the share of positions with the same most probable
token.

Text: perplexity of held-out conversations, and of the assistant's words alone, because training
hardly included the user's. The difference is of the mean cost of a token, in nats, paired by token.
Its standard error assumes that conversations, not tokens, are independent.

Tasks: greedy answers to items held out by their question, right only to the letter as in
demo_model/evaluation.py. Differences are paired by item, in percentage points with an interval of
95 %. If several items ask the same in other words, the questions count as independent, not the
items.

--shape adds the logits of Qwen3-0.6B's shape with random weights: no redundancy, no training.

Results do not depend on the number of threads; one is best for so small a model on a busy machine.
Which questions and tool tasks the curriculum draws depends on PYTHONHASHSEED: set it to have the
same in another run.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.models.accuracy_items import Task, Text, held_out_tasks, held_out_texts
from benchmarks.models.accuracy_statistics import LogitError, PairedAccuracy, mean_and_error
from benchmarks.result_files import options_of, write
from demo_model import curriculum
from quire import LLM, SamplingParams
from quire.ops.host.native import core
from quire.ops.host.threads import set_num_threads
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import random_prompts

SHAPE = "shape:qwen3-0.6b"
SHAPE_PROMPTS, SHAPE_TOKENS = 4, 9
MAX_POINTS_LOST = 0.5  # what int8 may cost
ALL = "all"
SETTINGS = {
    "device": "cpu",
    "disable_log_stats": True,
    "enable_prefix_caching": False,
    "max_logprobs": -1,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 512 << 20,
}

Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Format:
    """How weights are stored, and keys and values. group_size, head and kv: as the settings
    quantization_group_size, quantized_head and kv_cache_dtype."""

    name: str
    dtype: str = "bfloat16"
    quantization: str | None = None
    group_size: int | None = None
    head: str = "auto"
    kv: str = "auto"

    @property
    def is_plain(self) -> bool:
        """Whether nothing is rounded but to the dtype."""
        return self.quantization is None and self.kv == "auto"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "quantization_group_size": self.group_size,
            "quantized_head": self.head,
            "kv_cache_dtype": self.kv,
        }

    @property
    def bases(self) -> list[str]:
        """Names of the formats that it is compared with, nearest first."""
        if self.is_plain:
            return [] if self.dtype == "float32" else ["float32"]
        return list(dict.fromkeys((self.dtype, "float32")))


UNQUANTISED = [Format("float32", "float32"), Format("bfloat16")]
QUANTISED = [
    Format("int8", quantization="int8", group_size=128),
    Format("int8 rows", quantization="int8", group_size=0),
    Format("fp8", quantization="fp8"),
    Format("int8 KV", kv="int8"),
    Format("int4", quantization="int4", group_size=32, head="int8"),
    Format("int4 of 128", quantization="int4", group_size=128, head="int8"),
    Format("int4, head int4", quantization="int4", group_size=32, head="int4"),
    Format("int4 of 128, head int4", quantization="int4", group_size=128, head="int4"),
]
MORE = [
    Format("int8 but head", quantization="int8", group_size=128, head="none"),
    Format("int4 but head", quantization="int4", group_size=32, head="none"),
    Format("float32 int8", "float32", "int8", 128),
    Format("float32 int4", "float32", "int4", 32),
]


@dataclass
class Measured:
    """The results of one format.

    costs: per text [tokens - 1], in nats.
    logprobs: per text [P, V].
    right: per kind of task [I].
    """

    format: Format
    costs: list[Float32s] = field(default_factory=list)
    logprobs: list[Float32s] = field(default_factory=list)
    right: dict[str, Bools] = field(default_factory=dict)
    seconds: float = 0.0


def full_logprobs(llm: LLM, token_ids: list[int]) -> Float32s:
    """Return next-token log-probabilities [len(token_ids) - 1, V] after each token but the last."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    output = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    rows = [position for position in output.prompt_logprobs if position is not None]
    logprobs_PV = np.empty((len(rows), len(rows[0])), dtype=np.float32)
    for logprobs_V, position in zip(logprobs_PV, rows, strict=True):
        logprobs_V[list(position)] = [candidate.logprob for candidate in position.values()]
    return logprobs_PV


def token_costs(llm: LLM, texts: Sequence[Text]) -> list[Float32s]:
    """Return minus the log-probability of each token but the first, text by text."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": text.token_ids} for text in texts]
    costs = []
    for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(text.token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found = [-position[token].logprob for token, position in pairs if position is not None]
        costs.append(np.array(found, dtype=np.float32))
    return costs


def answers_right(llm: LLM, tasks: Sequence[Task]) -> Bools:
    """Return whether the greedy answers are right [I]."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=task.max_tokens, skip_special_tokens=False)
        for task in tasks
    ]
    outputs = llm.generate([task.prompt for task in tasks], params, use_tqdm=False)
    pairs = zip(tasks, outputs, strict=True)
    return np.array([task.is_right(output.outputs[0].text) for task, output in pairs])


def first_texts(texts: Sequence[Text], num_positions: int) -> Iterator[Text]:
    """Yield the first texts that together hold num_positions positions."""
    for text in texts:
        if num_positions <= 0:
            return
        yield text
        num_positions -= len(text.token_ids) - 1


def measure(
    format: Format, tasks: dict[str, list[Task]], texts: list[Text], num_positions: int
) -> Measured:
    """Measure everything with the demo model; prints as it goes."""
    began, measured = time.perf_counter(), Measured(format)
    with LLM("demo", **SETTINGS, **format.settings) as llm:
        for text in first_texts(texts, num_positions):
            measured.logprobs.append(full_logprobs(llm, text.token_ids))
        measured.costs = token_costs(llm, texts)
        for kind, listed in tasks.items():
            measured.right[kind] = answers_right(llm, listed)
    measured.seconds = time.perf_counter() - began
    print(f"# {format.name}: {measured.seconds:.0f} s", flush=True)
    return measured


def measure_shape(format: Format, model: str) -> Measured:
    """Measure logits alone, with random weights and tokens."""
    began, measured = time.perf_counter(), Measured(format)
    sizes = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "load_format": "dummy"}
    with LLM(model, **{**SETTINGS, **sizes, **format.settings}) as llm:
        vocab_size = llm.engine.spec.vocab_size
        for token_ids in random_prompts(SHAPE_PROMPTS, SHAPE_TOKENS, vocab_size, seed=0):
            measured.logprobs.append(full_logprobs(llm, token_ids))
    measured.seconds = time.perf_counter() - began
    print(f"# {model}, {format.name}: {measured.seconds:.0f} s", flush=True)
    return measured


def logit_figures(measured: Measured, base: Measured) -> dict[str, Any]:
    error = LogitError()
    for base_PV, other_PV in zip(base.logprobs, measured.logprobs, strict=True):
        error.add(base_PV, other_PV)
    return error.figures()


def text_figures(
    measured: Measured, base: Measured, texts: Sequence[Text]
) -> dict[str, dict[str, float]]:
    """Return the perplexity of all tokens and of answers, and the paired difference to the base."""
    found = {}
    masks = {ALL: [np.ones(len(t.token_ids) - 1, bool) for t in texts]}
    masks["answers"] = [text.is_answer[1:] for text in texts]
    for name, chosen in masks.items():
        costs = [cost[mask] for cost, mask in zip(measured.costs, chosen, strict=True)]
        before = [cost[mask] for cost, mask in zip(base.costs, chosen, strict=True)]
        differences = [a - b for a, b in zip(costs, before, strict=True)]
        difference, error = mean_and_error(differences)
        found[name] = {
            "tokens": sum(map(len, costs)),
            "perplexity": math.exp(mean_and_error(costs)[0]),
            "base_perplexity": math.exp(mean_and_error(before)[0]),
            "difference": difference,
            "error": error,
        }
    return found


def task_figures(
    measured: Measured, base: Measured, keys: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Return the figures by kind, and of all items together. keys: the items' questions."""
    pairs = {kind: (base.right[kind], right, keys[kind]) for kind, right in measured.right.items()}
    if pairs:
        before, after, _ = zip(*pairs.values(), strict=True)
        all_keys = [f"{kind} {key}" for kind in pairs for key in keys[kind]]
        pairs[ALL] = (np.concatenate(before), np.concatenate(after), all_keys)
    return {kind: PairedAccuracy.of(*pair).figures() for kind, pair in pairs.items()}


def compare(
    measured: Measured,
    bases: dict[str, Measured],
    texts: Sequence[Text],
    keys: dict[str, list[str]],
) -> list[dict[str, Any]]:
    """Return one entry per base. A format without one is compared with itself, for its own
    figures."""
    return [
        {
            "format": measured.format.name,
            "against": name,
            "seconds": measured.seconds,
            "logits": logit_figures(measured, bases[name]),
            "text": text_figures(measured, bases[name], texts),
            "tasks": task_figures(measured, bases[name], keys),
        }
        for name in measured.format.bases or [measured.format.name]
    ]


def print_logits(results: Sequence[dict[str, Any]], title: str) -> None:
    print(f"\n{title}, {results[0]['logits']['positions']:,} positions")
    print(
        f"{'':24}{'against':10}{'mean |d|':>10}{'max |d|':>9}{'relative':>10}{'KL':>11}"
        f"{'max KL':>9}{'same best':>11}"
    )
    for result in results:
        found = result["logits"]
        if result["format"] == result["against"]:
            continue
        print(
            f"{result['format']:24}{result['against']:10}{found['mean_absolute']:10.4f}"
            f"{found['largest_absolute']:9.2f}{found['relative']:10.2%}{found['divergence']:11.2e}"
            f"{found['largest_divergence']:9.3f}{found['same_best_token']:11.2%}"
        )


def print_texts(results: Sequence[dict[str, Any]]) -> None:
    counts = [f"{found['tokens']:,}" for found in results[0]["text"].values()]
    print(f"\nperplexity of {counts[0]} tokens of held-out text, {counts[1]} of them answers")
    heads = f"{'perplexity':>12}{'difference in nats':>24}"
    print(f"{'':24}{'against':10}{heads}{'answers':>11}{'difference in nats':>24}")
    for result in results:
        cells = ""
        for found in result["text"].values():
            cells += f"{found['perplexity']:12.4f}"
            cells += f"{found['difference']:+14.5f} +- {found['error']:.5f} "
        print(f"{result['format']:24}{result['against']:10}{cells}")


def print_tasks(results: Sequence[dict[str, Any]]) -> None:
    kinds = list(results[0]["tasks"])
    print("\naccuracy in %; below it the points gained or lost, with their 95 % interval")
    print(f"{'':24}{'against':10}" + "".join(f"{kind:>13}" for kind in kinds))
    shown = ""
    for result in results:
        tasks, name, against = result["tasks"], result["format"], result["against"]
        if name != shown:
            row = "".join(f"{tasks[kind]['accuracy']:13.2%}" for kind in kinds)
            print(f"{name:34}{row}")
            shown = name
        if against != name:
            row = "".join(f"{_points(tasks[kind]):>13}" for kind in kinds)
            print(f"{'':24}{against:10}{row}")
    print()
    for result in results:
        if "int8" in result["format"].split(",")[0]:
            print(verdict(result))


def _points(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['points']:+.2f}+-{(high - low) / 2:.2f}"


def verdict(result: dict[str, Any]) -> str:
    """Return whether a format is shown to lose less than MAX_POINTS_LOST, over all items and by
    kind."""
    kinds: dict[str, list[str]] = {"shown": [], "open": [], "false": []}
    for kind, figures in result["tasks"].items():
        kinds[_state(*figures["interval"])].append(kind)
    found = result["tasks"][ALL]
    low, high = found["interval"]
    words = f"{_state(low, high)} over all items"
    for state in ("open", "false"):
        if listed := [kind for kind in kinds[state] if kind != ALL]:
            words += f"; {state} for {', '.join(listed)}"
    return (
        f"{result['format']} against {result['against']}: {found['points']:+.3f} points"
        f" [{low:+.3f}, {high:+.3f}] of {found['items']:,} items, {found['lost']} lost and"
        f" {found['gained']} gained, p = {found['p_value']:.2f}."
        f" Less than {MAX_POINTS_LOST:g} lost: {words}."
    )


def _state(low: float, high: float) -> str:
    """Return the verdict of an interval about the claim."""
    if low > -MAX_POINTS_LOST:
        return "shown"
    return "false" if high <= -MAX_POINTS_LOST else "open"


def study(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all chosen formats; the report is written after each."""
    with LLM("demo", **SETTINGS) as llm:
        tokenizer = llm.get_tokenizer()
    texts = held_out_texts(options.text_tokens, tokenizer)
    tasks = {kind: held_out_tasks(kind, options.items, tokenizer) for kind in options.kinds}
    keys = {kind: [task.item.key for task in listed] for kind, listed in tasks.items()}
    distinct = {kind: len(set(listed)) for kind, listed in keys.items()}
    for kind, listed in tasks.items():
        print(f"# {kind}: {len(listed):,} items, asking {distinct[kind]:,} things")
    bases: dict[str, Measured] = {}
    report: dict[str, Any] = {"distinct": distinct, "results": [], "shape": []}
    for format in chosen(options.formats):
        measured = measure(format, tasks, texts, options.positions)
        if format.is_plain:
            bases[format.name] = measured
        report["results"] += compare(measured, bases, texts, keys)
        save(report, options)
    if options.shape:
        report["shape"] = shape_study(options)
        save(report, options)
    return report


def save(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the rows so far: first the demo model's, then the shape's."""
    rows = [{"model": "demo", **row} for row in report["results"]]
    rows += [{"model": options.shape, **row} for row in report["shape"]]
    settings = options_of(options) | {"distinct": report["distinct"]}
    write(options.output_json, "models.accuracy", rows, settings)


def shape_study(options: argparse.Namespace) -> list[dict[str, Any]]:
    bases: dict[str, Measured] = {}
    results: list[dict[str, Any]] = []
    for format in chosen(options.formats):
        measured = measure_shape(format, options.shape)
        if format.is_plain:
            bases[format.name] = measured
        results += [
            {"format": format.name, "against": n, "logits": logit_figures(measured, bases[n])}
            for n in format.bases
        ]
    return results


def chosen(names: Sequence[str]) -> list[Format]:
    """Return the unquantised formats, which are the base of the others, and the formats with these
    names."""
    return UNQUANTISED + [format for format in QUANTISED + MORE if format.name in names]


def make_parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    names = [format.name for format in QUANTISED]
    known = names + [format.name for format in MORE]
    parser.add_argument("--items", type=int, default=2000, help="of each kind of task")
    parser.add_argument("--kinds", nargs="*", default=list(curriculum.KINDS))
    parser.add_argument("--formats", nargs="*", choices=known, default=names, metavar="FORMAT")
    parser.add_argument("--text-tokens", type=int, default=100_000, help="for the perplexity")
    parser.add_argument("--positions", type=int, default=4000, help="whose logits are compared")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", nargs="?", const=SHAPE, help="also compare logits of this shape")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    torch.set_num_threads(options.threads)
    set_num_threads(options.threads)
    print_head("what number formats cost in accuracy")
    print(f"# C++ core: {'there' if core() else 'missing, so nothing can be quantised'}")
    began = time.perf_counter()
    report = study(options)
    print_logits(report["results"], "logits of the demo model on held-out text")
    print_texts(report["results"])
    if options.kinds:
        print_tasks(report["results"])
    if report["shape"]:
        print_logits(report["shape"], f"logits of {options.shape} with random weights")
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()

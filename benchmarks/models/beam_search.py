"""Compare beam search by transformers' `generate(num_beams=...)` and by quire, on one checkpoint.

    python -m benchmarks.models.beam_search [--models demo shape:qwen3-0.6b]

One process, alternating rounds, medians; 64 random prompt tokens, 64 output tokens, 4 beams, which
are all returned; batches of one prompt and of four. transformers has its default (dynamic) cache
and equal lengths, so that no token is padding. Output tokens per second count one sequence per
prompt, as a user does.

Sequences are compared, and their scores. In float32 two candidates with almost equal probabilities
can change places, and then the beams differ. In bf16 with random weights that is the rule. A
sequence that only one of the two found counts as different. The other's score at the same rank
distinguishes a near tie from a mistake.

KV memory: ours is the peak number of blocks in use. Theirs is computed: each beam holds its own
keys and values of prompt and output. (Reordering the beams takes as much again, which is not
counted.)
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.result_files import options_of, write
from quire.models.checkpoint.source import resolve_model
from quire.serve.python.beam_search import BeamSearchParams
from quire.serve.python.llm import LLM
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import random_prompts

try:
    import transformers
except ImportError:
    transformers = None

AIMS = {"demo": 2.0, "shape:qwen3-0.6b": 1.0}
DTYPES = {"demo": "float32"}  # others: bfloat16
Prompts = list[list[int]]
MIB = 1 << 20


@dataclass(frozen=True)
class Found:
    """The beams of one prompt, best first: output tokens, and score by length."""

    sequences: list[tuple[int, ...]]
    scores: list[float]


Search = Callable[[Prompts], list[Found]]


def checkpoint(model: str, dtype: torch.dtype, folder: Path) -> Path:
    """Return the model as it is, or random weights of its shape, written to folder."""
    found = resolve_model(model).directory
    if not model.startswith("shape:"):
        return Path(found)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(found)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.save_pretrained(folder)
    return folder


def their_search(directory: Path, dtype: torch.dtype, width: int, output_len: int) -> Search:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def search(prompts: Prompts) -> list[Found]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=output_len,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        tokens = [tuple(row) for row in out.sequences[:, ids.shape[1] :].tolist()]
        scores = out.sequences_scores.tolist()
        starts = range(0, len(tokens), width)
        return [Found(tokens[i : i + width], scores[i : i + width]) for i in starts]

    return search


def our_search(llm: LLM, width: int, output_len: int) -> Search:
    params = BeamSearchParams(width, output_len, ignore_eos=True)

    def search(prompts: Prompts) -> list[Found]:
        llm.reset_prefix_cache()
        found = []
        outputs = llm.beam_search(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = [tuple(beam.tokens[len(prompt) :]) for beam in output.sequences]
            found.append(Found(tokens, [b.cum_logprob / output_len for b in output.sequences]))
        return found

    return search


def peak_blocks(llm: LLM, params: BeamSearchParams, prompts: Prompts) -> int:
    """Return the peak number of blocks in use while a step is computed, in a run of its own."""
    engine, max_blocks = llm.engine, 0
    core = engine.client.core
    llm.reset_prefix_cache()
    for prompt in prompts:
        rendered = engine.renderer.render({"prompt_token_ids": prompt})
        core.add(engine.requests.make(rendered, params.sampling_params()))
    while core.has_work:
        while core.plan() is not None:
            max_blocks = max(
                max_blocks, sum(pool.num_used for pool in core.scheduler.memory.kv.pools)
            )
        core.take()
        core.publish()
    return max_blocks


def timed(search: Search, prompts: Prompts) -> tuple[float, list[Found]]:
    began = time.perf_counter()
    found = search(prompts)
    return time.perf_counter() - began, found


def difference(ours: list[Found], theirs: list[Found]) -> dict[str, Any]:
    """Return how many sequences only we found, how many best ones differ, and the largest
    difference of scores at the same rank."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "num_sequences": sum(len(a.sequences) for a in ours),
        "num_different": sum(len(set(a.sequences) - set(b.sequences)) for a, b in pairs),
        "num_best_different": sum(a.sequences[0] != b.sequences[0] for a, b in pairs),
        "score_difference": max(
            abs(x - y) for a, b in pairs for x, y in zip(a.scores, b.scores, strict=True)
        ),
        "mean_score_gain": statistics.mean(a.scores[0] - b.scores[0] for a, b in pairs),
    }


def measure_batch(
    llm: LLM, ours: Search, theirs: Search, prompts: Prompts, options: Any
) -> dict[str, Any]:
    """Measure both searches on one batch, in turn."""
    seconds: dict[str, list[float]] = {"transformers": [], "quire": []}
    for _ in range(options.rounds):
        spent, their_beams = timed(theirs, prompts)
        seconds["transformers"].append(spent)
        spent, our_beams = timed(ours, prompts)
        seconds["quire"].append(spent)
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    engine = llm.engine
    itemsize = getattr(torch, engine.config.model.dtype).itemsize
    block_size = engine.memory.block_size
    block_bytes = sum(g.block_bytes(block_size, itemsize) for g in engine.spec.cache_groups)
    length = options.input_len + options.output_len - 1  # the last token is never computed
    params = BeamSearchParams(options.width, options.output_len, ignore_eos=True)
    our_bytes = peak_blocks(llm, params, prompts) * block_bytes
    their_bytes = len(prompts) * options.width * length * block_bytes // block_size
    return {
        "num_prompts": len(prompts),
        "seconds": seconds,
        "tokens_per_second": {
            name: len(prompts) * options.output_len / s for name, s in medians.items()
        },
        "ratio": medians["transformers"] / medians["quire"],
        "kv_bytes": {"transformers": their_bytes, "quire": our_bytes},
        **difference(our_beams, their_beams),
    }


def compare(model: str, options: Any, folder: Path) -> dict[str, Any]:
    """Measure all batches of one model."""
    name = DTYPES.get(model, "bfloat16")
    dtype = getattr(torch, name)
    directory = checkpoint(model, dtype, folder)
    max_blocks = max(options.batches)
    with LLM(
        str(directory),
        dtype=name,
        device="cpu",
        max_model_len=options.input_len + options.output_len,
        max_num_seqs=max_blocks * options.width,
        disable_log_stats=True,
    ) as llm:
        theirs = their_search(directory, dtype, options.width, options.output_len)
        ours = our_search(llm, options.width, options.output_len)
        prompts = random_prompts(max_blocks, options.input_len, llm.engine.spec.vocab_size, seed=0)
        for search in (theirs, ours):
            search(prompts[:1])
        results = []
        for num in options.batches:
            got = measure_batch(llm, ours, theirs, prompts[:num], options)
            print_line(model, name, got)
            results.append(got)
    return {"model_id": model, "dtype": name, "batches": results}


def print_line(model: str, dtype: str, got: dict[str, Any]) -> None:
    speed, kv_bytes = got["tokens_per_second"], got["kv_bytes"]
    aim = f" (aim {AIMS[model]:g})" if model in AIMS else ""
    print(
        f"{model} in {dtype}, {got['num_prompts']} prompts: quire {speed['quire']:.1f} tokens/s,"
        f" transformers {speed['transformers']:.1f}: {got['ratio']:.2f} x{aim}"
    )
    print(
        f"  sequences different: {got['num_different']} of {got['num_sequences']}; best ones"
        f" {got['num_best_different']} of {got['num_prompts']}; scores at the same rank differ by"
        f" at most {got['score_difference']:.1e}; ours of the best one less theirs:"
        f" {got['mean_score_gain']:+.1e}"
    )
    print(
        f"  KV memory: quire {kv_bytes['quire'] / MIB:.2f} MiB at most, transformers"
        f" {kv_bytes['transformers'] / MIB:.2f} MiB computed:"
        f" {1 - kv_bytes['quire'] / kv_bytes['transformers']:.0%} saved",
        flush=True,
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(AIMS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if transformers is None:
        print("skipped: transformers is not installed (pip install transformers)", file=sys.stderr)
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print_head(
        f"beam search: {options.width} beams, {options.input_len} + {options.output_len} tokens,"
        f" against transformers {transformers.__version__}"
    )
    results = []
    for model in options.models:
        is_made = model.startswith("shape:")
        with tempfile.TemporaryDirectory() if is_made else nullcontext("") as folder:
            results.append(compare(model, options, Path(folder)))
    settings = options_of(options) | {"transformers": transformers.__version__}
    rows = [
        {"model_id": got["model_id"], "dtype": got["dtype"], **batch}
        for got in results
        for batch in got["batches"]
    ]
    write(options.output_json, "models.beam_search", rows, settings)


if __name__ == "__main__":
    main()

"""Part `peers`: the same requests by quire and by other engines, each in a process of its own.

The model has Qwen3-0.6B's or Llama-3.1-8B's shape and random weights in bfloat16. Prompts are
random token ids; decoding is greedy, without an end of sequence. So all engines do the same
arithmetic, and make the requested number of tokens. The small model serves the first 64 and all 256
of the random requests. It also serves 32 equal requests, which suit a static batch best. The 8B
serves one and 32 equal requests. An engine that cannot be imported is skipped; a slow one keeps the
workloads that it finished.
"""

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.context import Bench, OutOfTime
from benchmarks.gpu.floors import H200, run_floor_s
from benchmarks.gpu.report import Row
from benchmarks.gpu.workload import LONGEST, SHORTEST, Request, num_output, random_requests
from quire.models.checkpoint.source import resolve_model
from quire.spec.model_spec import ModelSpec, load_spec

SMALL, LARGE = "shape:qwen3-0.6b", "shape:llama-3.1-8b"
TINY_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# Of the time that a run of fewer requests promises for more of them: larger batches are faster.
MIN_RATE_SHARE = 0.5
Serve = Callable[[Sequence[Request]], list[list[int]]]


@dataclass(frozen=True)
class Workload:
    """name: the same in all engines' files."""

    name: str
    requests: list[Request]


def workloads(bench: Bench, vocab_size: int) -> list[Workload]:
    """Return the workloads, the short one first: its time shows whether there is time for the long
    one."""
    shortest, longest = (5, 20) if bench.is_tiny else (SHORTEST, LONGEST)
    counts = (2, 4) if bench.is_tiny else (64, 256)
    found = []
    for count in counts:
        name = f"{count} of {shortest}-{longest} + {shortest}-{longest}"
        found.append(Workload(name, random_requests(vocab_size, count, shortest, longest)))
    found.insert(1, equal_workload(bench, vocab_size))
    return found


def equal_workloads(bench: Bench, vocab_size: int) -> list[Workload]:
    """Return one request, and a batch of them."""
    return [equal_workload(bench, vocab_size, 1), equal_workload(bench, vocab_size)]


def equal_workload(bench: Bench, vocab_size: int, count: int = 32) -> Workload:
    """Return requests of one length."""
    prompt, output = (8, 6) if bench.is_tiny else (512, 128)
    count = min(count, bench.pick(count, 2))
    prompts = random_requests(vocab_size, count, prompt, prompt, seed=5)
    requests = [Request(each.prompt, output) for each in prompts]
    return Workload(f"{count} of {prompt} + {output}", requests)


@contextmanager
def model_directory(is_tiny: bool, model: str = SMALL) -> Iterator[Path]:
    """Yield a directory with the config alone, small for a tiny run."""
    source = resolve_model(model).directory / "config.json"
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "config.json"
        if is_tiny:
            config = json.loads(source.read_text(encoding="utf-8")) | TINY_CONFIG
            path.write_text(json.dumps(config), encoding="utf-8")
        else:
            shutil.copy(source, path)
        yield Path(name)


def measure(
    bench: Bench, engine: str, serve: Serve, target: Sequence[Workload], spec: ModelSpec
) -> None:
    """Serve each workload twice, once if there is no time for more; the faster counts."""
    rate_s = 0.0  # of an output token, as seen last
    for workload in target:
        count = num_output(workload.requests)
        if rate_s * count * MIN_RATE_SHARE > bench.left_s:
            bench.report.skip(f"{engine}, {workload.name}", "it would take longer than is left")
            continue
        took: list[float] = []

        def rounds(workload: Workload = workload, took: list[float] = took) -> None:
            while len(took) < 2 and (not took or took[0] < bench.left_s / 2):
                began = time.perf_counter()
                tokens = serve(workload.requests)
                took.append(time.perf_counter() - began)
                check_counts(tokens, workload.requests)

        try:
            bench.attempt(f"{engine}, {workload.name}", rounds)
        except OutOfTime as error:
            bench.report.skip(f"{engine}, {workload.name}", str(error))
        if took:
            add_rate(bench, engine, workload, took, spec)
            rate_s = took[-1] / count


def check_counts(tokens: Sequence[Sequence[int]], requests: Sequence[Request]) -> None:
    """Raise ValueError if an engine made fewer or more tokens than requested."""
    counts, target = [len(each) for each in tokens], [each.output_len for each in requests]
    if counts != target:
        wrong = sum(a != b for a, b in zip(counts, target, strict=False))
        raise ValueError(
            f"{sum(counts)} tokens of {len(counts)} requests, {sum(target)} of {len(target)} asked"
            f" for; {wrong} have another number"
        )


def add_rate(
    bench: Bench, engine: str, workload: Workload, took: Sequence[float], spec: ModelSpec
) -> None:
    """Add a row, and the rate for the comparison after all engines."""
    lengths = [request.lengths for request in workload.requests]
    floor_s = run_floor_s(spec, lengths, H200)
    measured_s = run_floor_s(spec, lengths, bench.measured) if bench.measured else None
    rate = num_output(workload.requests) / min(took)
    detail = {"output tokens": num_output(workload.requests), "runs": len(took)}
    figure = f"{rate:,.0f} tokens/s"
    rates = bench.report.facts.setdefault("rates", {}).setdefault(workload.name, {})
    rates[engine] = rate
    bench.report.add(
        Row(f"{workload.name}: {engine}", min(took), floor_s, measured_s, figure, detail=detail)
    )


def comparison(pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines of a table: for each workload the engines, fastest first, and quire's ratio to
    the fastest of the others."""
    rates: dict[str, dict[str, float]] = {}
    for piece in pieces:
        for workload, found in piece["facts"].get("rates", {}).items():
            rates.setdefault(workload, {}).update(found)
    lines = []
    for workload, found in rates.items():
        order = sorted(found.items(), key=lambda item: -item[1])
        listed = "; ".join(f"{name} {rate:,.0f}".replace("|", "/") for name, rate in order)
        others = [rate for name, rate in found.items() if not name.startswith("quire")]
        ours = [rate for name, rate in found.items() if name.startswith("quire")]
        verdict = f"{max(ours) / max(others):.2f} x" if ours and others else ""
        lines.append(f"| {workload} | {listed} | {verdict} |")
    head = ["| workload | output tokens/s | quire, of the best other |", "|---|---|---|"]
    return ["## quire and the others", "", *head, *lines, ""] if lines else []


def run_quire(bench: Bench) -> None:
    """Run quire with its defaults."""
    by_quire(bench, SMALL, workloads)


def run_quire_8b(bench: Bench) -> None:
    """Run quire with the static batches of the 8B."""
    by_quire(bench, LARGE, equal_workloads)


def by_quire(bench: Bench, model: str, target: Callable[[Bench, int], list[Workload]]) -> None:
    from benchmarks.gpu.engine import generate_tokens
    from quire.serve.python.llm import LLM

    with model_directory(bench.is_tiny, model) as directory:
        spec = load_spec(directory)
        settings: dict[str, Any] = {"load_format": "dummy", "device": bench.device.type}
        settings |= {"max_model_len": 64 if bench.is_tiny else 2304, "max_num_seqs": 256}
        settings |= {"dtype": str(bench.dtype).removeprefix("torch."), "disable_log_stats": True}
        settings |= {"enable_prefix_caching": False}
        if bench.is_tiny:
            settings |= {"kv_cache_memory_bytes": 1 << 24}
        with LLM(str(directory), **settings) as llm:
            generate_tokens(llm, random_requests(spec.vocab_size, 4, 5, 20))
            serve = partial(generate_tokens, llm)
            measure(bench, "quire", serve, target(bench, spec.vocab_size), spec)


# ---- transformers ------------------------------------------------------------------------------


def attention_names(is_cuda: bool) -> list[str]:
    """Return possible implementations, the fastest first; `paged|sdpa` always exists."""
    found = []
    if is_cuda and _has("flash_attn_interface"):
        found.append("flash_attention_3")
    if is_cuda and _has("flash_attn"):
        found.append("flash_attention_2")
    if is_cuda and _has("kernels"):
        found += ["kernels-community/flash-attn3", "kernels-community/flash-attn2"]
    return [*found, "paged|sdpa", "paged|eager"]


def transformers_model(bench: Bench, directory: Path, attention: str) -> tuple[Any, ModelSpec]:
    """Return a model with random weights on the device, in the shape of the directory's config."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=bench.dtype, attn_implementation=attention
        )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(bench.device).eval(), load_spec(directory)


GRAPHS = {"use_cuda_graph": True, "use_async_batching": True}


def run_transformers(bench: Bench) -> None:
    """Run continuous batching with the first attention that works; with its defaults, and with
    graphs."""
    import torch

    if not _has("transformers"):
        bench.report.skip("transformers", "it is not installed")
        return
    with model_directory(bench.is_tiny) as directory, torch.inference_mode(False):
        *others, last = attention_names(bench.is_cuda)
        for attention in others:
            engine = f"transformers batching, {attention}"
            if attempt_optional(
                bench, engine, partial(batching, bench, directory, attention, {}, engine)
            ):
                break
        else:
            attention, engine = last, f"transformers batching, {last}"
            bench.attempt(engine, partial(batching, bench, directory, last, {}, engine))
        if bench.is_cuda:
            engine += ", graphs and async"
            attempt_optional(
                bench, engine, partial(batching, bench, directory, attention, GRAPHS, engine)
            )


def attempt_optional(bench: Bench, engine: str, work: Callable[[], object]) -> bool:
    """Run optional work; an error becomes the reason to skip it."""
    try:
        work()
    except OutOfTime:
        raise
    except Exception as error:
        bench.report.skip(engine, f"{type(error).__name__}: {error}")
        return False
    return True


def batching(
    bench: Bench, directory: Path, attention: str, settings: dict[str, Any], engine: str
) -> None:
    """Run all workloads by one manager."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model, spec = transformers_model(bench, directory, attention)
    vocab_size = spec.vocab_size
    generation = GenerationConfig(max_new_tokens=LONGEST, do_sample=False, eos_token_id=-1)
    generation.pad_token_id = 0
    if not bench.is_cuda:
        settings = settings | {"num_blocks": 64, "max_batch_tokens": 256, "block_size": 16}
    settings = settings | {"allow_block_sharing": False}
    manager = model.init_continuous_batching(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
    )
    try:
        manager.warmup()
        manager.start()
        serve = lambda requests: by_manager(bench, manager, requests)  # noqa: E731
        short = [Request(each.prompt, 4) for each in random_requests(vocab_size, 8, 5, 20)]
        check_counts(serve(short), short)
        measure(bench, engine, serve, workloads(bench, vocab_size), spec)
    finally:
        manager.stop(block=True, timeout=10)


def by_manager(bench: Bench, manager: Any, requests: Sequence[Request]) -> list[list[int]]:
    """Return outputs in the order of the requests. Raises RuntimeError if its thread ends, and
    OutOfTime with the outputs so far."""
    tag = f"{time.monotonic_ns()}"
    names = [f"{tag}-{index}" for index in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        manager.add_request(request.prompt, request_id=name, max_new_tokens=request.output_len)
    found: dict[str, list[int]] = {}
    began = time.perf_counter()
    while len(found) < len(requests):
        if bench.left_s <= 0:
            made, took = sum(map(len, found.values())), time.perf_counter() - began
            done = f"{len(found)} of {len(requests)} requests were done"
            raise OutOfTime(f"stopped after {took:.1f} s: {done}, {made} tokens")
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the generation thread ended")
        if result is None or not result.is_finished() or result.request_id not in names:
            continue
        if result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        found[result.request_id] = list(result.generated_tokens)
    return [found[name] for name in names]


def run_generate(bench: Bench) -> None:
    """Run transformers' `generate` with a static batch: plain, and compiled over a static cache."""
    caches = {"dynamic cache": None, "static cache, compiled": "static"}
    with_generate(bench, SMALL, caches, lambda b, size: [equal_workload(b, size)])


def run_generate_8b(bench: Bench) -> None:
    """Run `generate` with the 8B, compiled over a static cache."""
    with_generate(bench, LARGE, {"static cache, compiled": "static"}, equal_workloads)


def with_generate(
    bench: Bench,
    name: str,
    caches: Mapping[str, str | None],
    target: Callable[[Bench, int], list[Workload]],
) -> None:
    import torch

    if not _has("transformers"):
        bench.report.skip("transformers", "it is not installed")
        return
    with model_directory(bench.is_tiny, name) as directory, torch.inference_mode(False):
        model, spec = transformers_model(bench, directory, "sdpa")
        for title, cache in caches.items():
            serve = lambda requests, c=cache: by_generate(model, requests, c)  # noqa: E731
            requests = target(bench, spec.vocab_size)
            measure(bench, f"transformers generate, {title}", serve, requests, spec)


def by_generate(model: Any, requests: Sequence[Request], cache: str | None) -> list[list[int]]:
    """Generate one static batch of requests of equal lengths. With a static cache on a GPU
    transformers compiles the step by itself."""
    import torch

    ids = torch.tensor([request.prompt for request in requests], device=model.device)
    length = requests[0].output_len
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=length,
            max_new_tokens=length,
            do_sample=False,
            cache_implementation=cache,
        )
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


# ---- engines that are there or not -------------------------------------------------------------


def run_vllm(bench: Bench) -> None:
    """Run vLLM, if it can be imported."""
    if not _has("vllm"):
        bench.report.skip("vllm", "it is not installed")
        return
    bench.attempt("vllm", lambda: by_vllm(bench))


def by_vllm(bench: Bench) -> None:
    from vllm import LLM, SamplingParams

    with model_directory(bench.is_tiny) as directory:
        llm = LLM(
            str(directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2304,
            max_num_seqs=256,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

        def serve(requests: Sequence[Request]) -> list[list[int]]:
            params = [
                SamplingParams(
                    temperature=0.0, max_tokens=r.output_len, ignore_eos=True, detokenize=False
                )
                for r in requests
            ]
            prompts = [{"prompt_token_ids": request.prompt} for request in requests]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        spec = load_spec(directory)
        measure(bench, "vllm", serve, workloads(bench, spec.vocab_size), spec)


def run_sglang(bench: Bench) -> None:
    """Run SGLang, if it can be imported."""
    if not _has("sglang"):
        bench.report.skip("sglang", "it is not installed")
        return
    bench.attempt("sglang", lambda: by_sglang(bench))


def by_sglang(bench: Bench) -> None:
    import sglang

    with model_directory(bench.is_tiny) as directory:
        engine = sglang.Engine(
            model_path=str(directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            context_length=2304,
            max_running_requests=256,
            disable_radix_cache=True,
        )

        def serve(requests: Sequence[Request]) -> list[list[int]]:
            params = [
                {"temperature": 0.0, "max_new_tokens": r.output_len, "ignore_eos": True}
                for r in requests
            ]
            outputs = engine.generate(
                input_ids=[r.prompt for r in requests], sampling_params=params
            )
            return [list(output["output_ids"]) for output in outputs]

        try:
            spec = load_spec(directory)
            measure(bench, "sglang", serve, workloads(bench, spec.vocab_size), spec)
        finally:
            engine.shutdown()


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None

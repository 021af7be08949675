"""Part `first`: right answers and speed on this GPU, in the first minutes of a run.

A model answers greedily as it is served (Triton's kernels, graphs). Then a reference, which shares
no kernel with it, reads the same prompts followed by the answers. It computes the log-probability
of each token. An answer is right if the reference agrees with each token's log-probability within
the rounding of the dtype. Each token may also be less likely than the reference's choice by at most
that much. So a near tie, which rounding may decide either way, is not an error. One wrong token
does not make the later ones wrong.

    served      prompt of 20 to 400 tokens | t1 t2 t3 ... t48
    reference   prompt                       t1 t2 t3 ... t48     one pass; log p of each t

The reference is the CPU in float32 for the demo model and for Qwen3-0.6B's shape. For
Llama-3.1-8B's it is torch's operations without Triton on the GPU, because the CPU would take
minutes.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.context import Bench
from benchmarks.gpu.engine import engine
from benchmarks.gpu.report import Row
from benchmarks.gpu.table import LLAMA, SMALL, Cases
from benchmarks.gpu.workload import random_requests
from quire.base.requests.sampling_params import SamplingParams
from quire.serve.python.llm import LLM

DEMO = "demo"
NUM_PROMPTS, NUM_TOKENS = 8, 48
SHORTEST, LONGEST = 20, 400
# Nats. On a CPU bfloat16 moves these models by 0.014, attention scaled wrongly by a quarter by 0.2.
FLOAT32, BFLOAT16 = 1e-3, 0.08
TEXTS = (
    "Once upon a time",
    "Tom had a red ball. He gave it to Anna. Who has the ball?",
    "What is 12 + 7?",
)


@dataclass(frozen=True)
class Answer:
    """tokens: the prompt and what came behind it. logprobs: of the latter."""

    tokens: list[int]
    logprobs: list[float]
    text: str = ""


@dataclass(frozen=True)
class Distance:
    """Of answers from what a reference says. apart: the largest difference of a token's log
    probability; gap: the most that a token is less likely than the reference's own choice.
    num_same: tokens that the reference would choose, too."""

    apart: float
    gap: float
    num_same: int
    num_tokens: int

    @property
    def words(self) -> str:
        return f"{self.num_same} of {self.num_tokens} tokens the same, log p {self.apart:.2g} apart"


def answers(llm: LLM, prompts: Sequence[Any], num_tokens: int) -> list[Answer]:
    """Return greedy answers, with log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (sample,) = output.outputs
        chosen = zip(sample.token_ids, sample.logprobs, strict=True)
        logprobs = [position[token].logprob for token, position in chosen]
        tokens = [*output.prompt_token_ids, *sample.token_ids]
        found.append(Answer(tokens, logprobs, sample.text))
    return found


def distance(reference: LLM, given: Sequence[Answer]) -> Distance:
    """Let the reference read the answers. Raises ValueError if there is nothing to compare."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": each.tokens} for each in given]
    apart, gap = list[float](), list[float]()
    for answer, output in zip(
        given, reference.generate(prompts, params, use_tqdm=False), strict=True
    ):
        positions = output.prompt_logprobs[len(answer.tokens) - len(answer.logprobs) :]
        tokens = answer.tokens[-len(answer.logprobs) :]
        for token, served, at in zip(tokens, answer.logprobs, positions, strict=True):
            found = {each: item.logprob for each, item in at.items()}
            apart.append(abs(found[token] - served))
            gap.append(max(found.values()) - found[token])
    if not apart:
        raise ValueError("no token was compared")
    # A NaN is neither near nor far: it is wrong.
    worst = max(apart) if all(value == value for value in apart) else float("inf")
    return Distance(worst, max(gap), sum(value <= 0.0 for value in gap), len(apart))


@dataclass(frozen=True)
class Model:
    """settings: as it is served. reference: settings of the other side; has_triton: whether the
    kernels are used there. max_distance: nats."""

    name: str
    title: str
    settings: dict[str, Any]
    reference: dict[str, Any]
    reference_words: str
    max_distance: float
    has_triton: bool = True


def check(bench: Bench, model: Model, prompts: Callable[[LLM], Sequence[Any]]) -> list[Answer]:
    """Compare the answers and add one row; raises an error if an answer is wrong."""
    case = f"answers of {model.title}, compared with {model.reference_words}"
    given: list[Answer] = []

    def compare() -> None:
        num_tokens = bench.pick(NUM_TOKENS, 6)
        with engine(bench, model.name, **model.settings) as llm:
            given.extend(answers(llm, prompts(llm), num_tokens))
        without = patch("quire.ops.gpu.has_triton", lambda: False)
        with (
            nullcontext() if model.has_triton else without,
            engine(bench, model.name, **model.reference) as llm,
        ):
            found = distance(llm, given)
        max_distance = model.max_distance if bench.is_cuda else FLOAT32
        if not max(found.apart, found.gap) <= max_distance:
            raise ValueError(
                f"WRONG: {found.words}, {found.gap:.2g} behind its choice; {max_distance} is the"
                " most"
                " that rounding does"
            )
        bench.report.add(
            Row(case, figure=found.words, aim=f"<= {max_distance} apart", is_reached=True)
        )

    bench.attempt(case, compare)
    return given


def random_prompts(bench: Bench) -> Callable[[LLM], list[Any]]:
    shortest, longest = bench.pick(SHORTEST, 3), bench.pick(LONGEST, 30)

    def make(llm: LLM) -> list[Any]:
        drawn = random_requests(llm.engine.spec.vocab_size, NUM_PROMPTS, shortest, longest, seed=9)
        return [{"prompt_token_ids": each.prompt} for each in drawn]

    return make


def on_cpu(bench: Bench) -> dict[str, Any]:
    """Return the settings of the CPU's side; without a GPU they use the plainest attention."""
    found: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    return found if bench.is_cuda else found | {"attention_backend": "reference"}


def run_demo(bench: Bench) -> None:
    """Run piece `demo-answers`: real weights, in float32 and as they are served."""
    small = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
    for dtype, max_distance in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        settings = small | {"dtype": dtype}
        title = f"the demo model, {dtype}"
        model = Model(
            DEMO, title, settings, small | on_cpu(bench), "the CPU's in float32", max_distance
        )
        given = check(bench, model, lambda llm: list(TEXTS))
        for prompt, answer in zip(TEXTS, given, strict=False):
            bench.report.facts[f"{title}: {prompt}"] = answer.text
    bench.report.write()


def run_small(bench: Bench) -> None:
    """Run piece `qwen3-0.6b-first`."""
    pool = {"max_model_len": 2304, "kv_cache_memory_bytes": 1 << 32}
    served = pool | {"dtype": "bfloat16", "max_num_seqs": 64}
    other, words = pool | on_cpu(bench), "the CPU's in float32"
    model = Model(SMALL, "0.6B (Qwen3's shape)", served, other, words, BFLOAT16)
    check(bench, model, random_prompts(bench))
    speeds(bench, SMALL, "0.6B")


def run_llama(bench: Bench) -> None:
    """Run piece `llama-8b-first`."""
    # Of 64 rows of 2,304 tokens 19 GB; the weights are 16 GB.
    pool = {"max_model_len": 2304, "kv_cache_memory_bytes": 20 << 30, "dtype": "bfloat16"}
    plain = "torch" if bench.is_cuda else "reference"
    other = pool | {"attention_backend": plain, "kv_cache_memory_bytes": 4 << 30}
    words = "torch's without Triton"
    served = pool | {"max_num_seqs": 64}
    max_distance = 2 * BFLOAT16  # the other side rounds as well
    model = Model(LLAMA, "8B (Llama-3.1's shape)", served, other, words, max_distance, False)
    check(bench, model, random_prompts(bench))
    speeds(bench, LLAMA, "8B")


def speeds(bench: Bench, name: str, title: str) -> None:
    """Measure the tokens per second of 1 and of 64 rows, and the time to a first token, with their
    floors."""

    def measure() -> None:
        with engine(bench, name, max_model_len=2304, max_num_seqs=64) as llm:
            cases = Cases(bench, llm, title)
            cases.decode(1, 512, steps=64)
            cases.prompt(2048)
            cases.decode(64, 512, steps=64)

    bench.attempt(f"how fast {title} is", measure)

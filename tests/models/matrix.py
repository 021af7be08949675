"""The features tested with every architecture, and their page (docs/use/model-table.md).

    python -m tests.models.matrix [TYPE ...]     # all, or these; writes docs/use/model-table.md

Each feature is a function of a tiny random checkpoint. It returns if the feature works. It raises
Refused if quire names the feature as unsupported, and fails otherwise.
"""

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.models.accuracy import SETTINGS, token_costs
from benchmarks.models.accuracy import chosen as chosen_formats
from benchmarks.models.accuracy_items import held_out_texts
from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.formats import IN_THE_DTYPE, WeightFormats, weight_formats
from quire.models.load.loading import LoadOptions, load_model
from quire.models.registry import MODELS
from quire.ops.host.native import core
from quire.spec.gguf.config import ARCHITECTURES as GGUF_ARCHITECTURES
from quire.spec.model_spec import ModelSpec, load_spec
from quire.tools.verify.compare import BOUNDS, LOSSY
from quire.tools.verify.ours import (
    AT_ONCE,
    CHUNKS,
    TOKEN_BY_TOKEN,
    WITH_OTHER_ROWS,
    runs_in_one_call,
    trace,
    way,
)
from quire.tools.verify.paged import Paging
from quire.tools.verify.theirs import Reference, Theirs
from quire.tools.verify.watch import LOGITS
from quire.tools.verify.weights import take_dequantised
from tests.models import type_survey
from tests.models.image_matrix import PAGE, YES, read_section
from tests.models.test_gguf_families import CONVERTIBLE, convertible
from tests.support.models.checkpoints import VARIANTS, random_tokens, write_checkpoint
from tests.support.models.gguf_writer import convert, model_metadata
from tests.support.models.paged_forward import CPU
from tests.support.models.reference_checkpoints import pool_bytes

EXACT = 1e-10
LONG = 4  # of the prompts; the short ones grow into windows
SHORTEST = 2  # of the long ones
LENGTHS = (40, 33, 17, 24, *(1,) * 8)
NUM_TOKENS = 10
MAX_LEN = 56
SHARED = 32  # tokens that the first two prompts begin with
LOSS_TOKENS = 20_000
LOSS_FORMATS = ("fp8", "int8", "int4", "int8 KV")
POOL_BLOCKS = 16  # of 4 tokens: too few for all that is asked at once


class Refused(Exception):
    """What quire says, by name, that it does not do."""


@dataclass(frozen=True)
class Tried:
    """A tiny checkpoint of an architecture."""

    folder: Path

    @cached_property
    def spec(self) -> ModelSpec:
        return load_spec(self.folder).served_up_to(MAX_LEN)

    @cached_property
    def prompts(self) -> list[list[int]]:
        first, second, *others = random_tokens(*LENGTHS)
        return [first, first[:SHARED] + second[SHARED:], *others]

    @cached_property
    def references(self) -> list[Reference]:
        """What transformers makes of each prompt, in float64."""
        theirs = Theirs(self.folder, self.spec, torch.float64, None)
        return [theirs.reference(prompt, NUM_TOKENS) for prompt in self.prompts]

    @cached_property
    def wanted(self) -> list[list[int]]:
        """The tokens that it chooses."""
        return [each.tokens[each.num_prompt :] for each in self.references]

    def load(self, dtype: torch.dtype, formats: WeightFormats = IN_THE_DTYPE) -> Any:
        return load_model(self.folder, self.spec, dtype, CPU, LoadOptions(formats=formats))

    def logits(self, model: Any, how: str, paging: Paging, number: int = 0) -> torch.Tensor:
        """Of one of the prompts and what transformers chose after it, [L, V]."""
        asked = way(how, self.references[number].tokens, self.spec.vocab_size)
        return trace(model, self.spec, asked, paging)[LOGITS]

    def check_logits(
        self, how: str, paging: Paging, bound: float, numbers: Sequence[int] = range(LONG)
    ) -> None:
        """numbers: of the prompts."""
        model = self.load(paging.dtype)
        for number in numbers:
            wanted = self.references[number].trace[LOGITS]
            check_near(self.logits(model, how, paging, number), wanted, bound)

    def open(self, **settings: Any) -> LLM:
        own = {"dtype": "float64", "max_model_len": MAX_LEN, "attention_backend": "torch"}
        own |= {"scheduling_policy": "fifo", "disable_log_stats": True, "block_size": 4}
        return LLM(str(self.folder), **(own | settings))

    def generate(self, llm: LLM, times: int = 1) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return llm.generate(self.prompts * times, params, use_tqdm=False)

    def check_engine(self, times: int = 1, **settings: Any) -> list[RequestOutput]:
        """Let the engine choose the tokens of all prompts, each so many times."""
        with self.open(**settings) as llm:
            outputs = self.generate(llm, times)
        assert chosen(outputs) == self.wanted * times
        return outputs


def chosen(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_near(got: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert error <= bound, f"the logits differ by {error:.1e} of their size, more than {bound:g}"


# ---- features --------------------------------------------------------------------------------


def float64(tried: Tried) -> None:
    tried.check_logits(AT_ONCE, exact_paging(), EXACT)
    tried.check_engine(attention_backend="reference", enable_prefix_caching=False)


def chunks(tried: Tried) -> None:
    tried.check_logits(CHUNKS, exact_paging(), EXACT)
    tried.check_logits(TOKEN_BY_TOKEN, exact_paging(), EXACT)
    tried.check_engine(max_num_batched_tokens=7)


def prefix_hit(tried: Tried) -> None:
    with tried.open() as llm:
        first, again = tried.generate(llm), tried.generate(llm)
    assert chosen(first) == chosen(again) == tried.wanted
    # Where prompts part, a state is left for the next that begins so, not for the second of them.
    shared = 0 if tried.spec.linear_layers else SHARED
    assert first[1].num_cached_tokens == shared, "of a prompt that begins as the first"
    assert all(output.num_cached_tokens for output in again[:LONG])


def preempted(mode: str) -> Callable[[Tried], None]:
    def feature(tried: Tried) -> None:
        outputs = tried.check_engine(
            times=2,
            preemption_mode=mode,
            kv_cache_memory_bytes=pool_bytes(tried.folder, POOL_BLOCKS, 4),
            enable_prefix_caching=False,
        )
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics)

    return feature


def batch_invariance(tried: Tried) -> None:
    """The same bits alone and beside others, by what real models run on."""
    if core() is None:
        raise Refused("it needs the C++ core")
    model = tried.load(torch.float32)
    alone = tried.logits(model, TOKEN_BY_TOKEN, cpu_paging(model))
    assert torch.equal(alone, tried.logits(model, WITH_OTHER_ROWS, cpu_paging(model)))


def backend(name: str) -> Callable[[Tried], None]:
    def feature(tried: Tried) -> None:
        if name == "triton":
            from benchmarks.gpu.interpreter import repair_interpreter  # it imports triton

            repair_interpreter()
        bound = BOUNDS[torch.float32]
        # Triton's interpreter takes seconds for each prompt.
        numbers = [SHORTEST] if name == "triton" else range(LONG)
        tried.check_logits(WITH_OTHER_ROWS, Paging(4, name, torch.float32), bound, numbers)
        if name == "cpu":
            paging = cpu_paging(tried.load(torch.float32))
            tried.check_logits(WITH_OTHER_ROWS, paging, bound)

    return feature


def weights(name: str) -> Callable[[Tried], None]:
    """Beside the same weights dequantised, and with the same tokens alone and in a batch."""

    def feature(tried: Tried) -> None:
        formats = weight_formats(ModelConfig(quantization=name))
        try:
            formats.check("float32", "cpu")
        except ConfigError as error:
            raise Refused(first_sentence(error)) from error
        packed, plain = tried.load(torch.float32, formats), tried.load(torch.float32)
        take_dequantised(plain, packed)
        wanted = tried.logits(plain, AT_ONCE, Paging(4, "reference", torch.float32))
        got = tried.logits(packed, WITH_OTHER_ROWS, cpu_paging(packed))
        check_near(got, wanted, LOSSY)
        check_stable(tried, quantization=name)

    return feature


def kv_int8(tried: Tried) -> None:
    paging = cpu_paging(tried.load(torch.float32), "int8")
    tried.check_logits(WITH_OTHER_ROWS, paging, LOSSY)
    check_stable(tried, kv_cache_dtype="int8")


def check_stable(tried: Tried, **settings: Any) -> None:
    """Tokens of a prompt are the same alone and in a batch."""
    own = {"dtype": "float32", "attention_backend": "cpu", "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with tried.open(**(own | settings)) as llm:
        together = chosen(tried.generate(llm))
        alone = [chosen(llm.generate([p], params, use_tqdm=False))[0] for p in tried.prompts]
    assert together == alone


def gguf(tried: Tried) -> None:
    """By the first variant that a GGUF file can say."""
    kind = tried.spec.model_type
    variant = next((name for name in CONVERTIBLE if VARIANTS[name][0] == kind), None)
    if variant is None:
        architecture = model_metadata(tried.spec.raw)["general.architecture"]
        assert architecture not in GGUF_ARCHITECTURES, "there is no variant of it"
        raise Refused("GGUF files of this type do not load")
    tried = Tried(convertible(tried.folder / "gguf", variant).directory)
    path = convert(tried.folder, tried.folder / "model.gguf")
    spec, reference = load_spec(path).served_up_to(MAX_LEN), tried.references[0]
    model = load_model(path, spec, torch.float64, CPU)
    got = trace(model, spec, way(CHUNKS, reference.tokens, spec.vocab_size), exact_paging())
    check_near(got[LOGITS], reference.trace[LOGITS], 1e-5)  # epsilons are stored in float32


def exact_paging() -> Paging:
    return Paging(4, "reference", torch.float64)


def cpu_paging(model: Any, kv_format: str = "auto") -> Paging:
    """As an engine on a CPU runs the model: in one call where the core can."""
    native = runs_in_one_call(model)
    return Paging(4, "cpu", torch.float32, kv_format=kv_format, native=native)


def first_sentence(error: Exception) -> str:
    return re.split(r"[;.] ", str(error))[0].rstrip(".")


@dataclass(frozen=True)
class Feature:
    """title: of its column. means: what is checked. quick: the type that `make test` tries it
    with."""

    title: str
    means: str
    check: Callable[[Tried], None]
    quick: str


FEATURES = {
    "exact": Feature(
        "float64",
        f"logits within {EXACT:g} of transformers', all in float64, and its greedy tokens",
        float64,
        "gemma2",
    ),
    "chunks": Feature(
        "chunks", "the same in odd chunks, and token by token", chunks,
        "cohere2",
    ),
    "prefix": Feature("prefix hit", "its tokens after cached blocks", prefix_hit, "olmo2"),
    "swap": Feature(
        "swapped", "its tokens where preempted rows are swapped to host memory",
        preempted("swap"), "qwen3",
    ),
    "recompute": Feature(
        "recomputed", "its tokens where preempted rows are recomputed",
        preempted("recompute"), "mistral",
    ),
    "batch": Feature(
        "batch", "logits of the same bits alone and in a batch (the C++ core, float32)",
        batch_invariance, "granite",
    ),
    **{
        name: Feature(name, f"logits by the attention backend {name}, in float32", backend(name), q)
        for name, q in (
            ("reference", "phi3"), ("torch", "opt"), ("cpu", "gpt2"), ("triton", "llama"),
        )
    },
    **{
        name: Feature(
            name, f"near the same weights dequantised, with the same tokens alone and in a batch"
            f" (weights in {name})", weights(name), q,
        )
        for name, q in (("int8", "deepseek_v3"), ("int4", "qwen3_moe"), ("fp8", "glm4"))
    },
    "kv": Feature(
        "int8 KV", "near transformers' logits, with the same tokens alone and in a batch", kv_int8,
        "gemma3_text",
    ),
    "gguf": Feature("GGUF", "transformers' logits from a GGUF file", gguf, "qwen2"),
}  # fmt: skip


# ---- the page --------------------------------------------------------------------------------


def variant_of(model_type: str) -> str:
    """The variant that stands for a type: the first."""
    return next(name for name, (kind, _) in VARIANTS.items() if kind == model_type)


def write_tiny(folder: Path, model_type: str) -> Tried:
    write_checkpoint(folder, variant_of(model_type))
    return Tried(folder)


def result(tried: Tried, feature: Feature) -> str:
    """`yes`, or why it is refused."""
    try:
        feature.check(tried)
    except Refused as reason:
        return str(reason)
    return YES


HEAD = """# Table of models

Look up what is tested for each model type that quire has a class for. [Models](models.md) says
which other models load.

Each type is tested as a tiny checkpoint with random weights. `tests/support/models/checkpoints.py`
has more variants of each. `make test` tests some features with one type, `make test-long` all of
them; `python -m tests.models.matrix` writes this page from the results.
"""
LOSSES_HEAD = f"""
## Loss by format

The table shows the demo model's loss on {LOSS_TOKENS:,} tokens of held-out text, in nats per token.
[Results](../results/numbers.md) has the accuracy of its answers.

| weights, or keys and values | loss | more than float32 |
|---|---|---|
"""
TAIL = """
## Other checks

- **Configs.** A test changes every field of each type's config and compares with transformers
  (`tests/models/test_every_field.py`). Each value has the same effect, or is refused by its name.
- **Your checkpoint.** `quire verify MODEL` makes the same comparisons with a real checkpoint.
- **Drafts.** EAGLE-3 heads of both layouts work with every type of the first table
  (`tests/models/test_eagle3.py`, `tests/models/test_reads.py`; [speculation](speculation.md)).
  Layers for multi-token prediction draft as defined, in float64 (`tests/models/test_mtp.py`).
- **Pooling.** All types of the first table give embeddings, classes and scores
  ([embeddings](embeddings.md)). Tests compare Qwen 3 and Llama with transformers' `AutoModel` and
  `AutoModelForSequenceClassification`, within 1e-10 in float64 (`tests/serve/test_pooling.py`).
- **Encoders.** `bert`, `roberta`, `xlm-roberta`, `camembert` and `modernbert` give embeddings,
  classes and scores of pairs, within 1e-10 of transformers' in float64, in any batch. With the C++
  core they give the same bits in any batch, in float32, bfloat16 and int8
  (`tests/serve/test_encoders.py`; [encoders](embeddings.md#encoders)). GGUF files of encoders do
  not load.
- **A type without a class.** `quire port DIRECTORY` begins one ([models](models.md)).
"""


def demo_losses(num_tokens: int) -> dict[str, float]:
    """Nats per token of held-out text, by format: what each costs the demo model."""
    with LLM("demo", **SETTINGS) as llm:
        texts = held_out_texts(num_tokens, llm.get_tokenizer())
    found = {}
    for format in chosen_formats(LOSS_FORMATS):
        with LLM("demo", **SETTINGS, **format.settings) as llm:
            found[format.name] = float(np.concatenate(token_costs(llm, texts)).mean())
    return found


def page(results: dict[str, dict[str, str]], losses: dict[str, float]) -> str:
    """results: by type and feature."""
    notes = list(dict.fromkeys(r for row in results.values() for r in row.values() if r != YES))
    titles = [feature.title for feature in FEATURES.values()]
    rows = [["", *titles], ["---"] * (len(titles) + 1)]
    for model_type in sorted(results):
        cells = (results[model_type][name] for name in FEATURES)
        marks = (YES if cell == YES else f"({notes.index(cell) + 1})" for cell in cells)
        rows.append([f"`{model_type}`", *marks])
    text = HEAD + f"\nCompared with transformers {transformers.__version__}.\n\n"
    text += "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n"
    text += "".join(f"({number}) {note}.\n" for number, note in enumerate(notes, 1))
    text += "\n" if notes else ""
    text += "".join(f"- **{each.title}**: {each.means}\n" for each in FEATURES.values())
    text += type_survey.read_section() + LOSSES_HEAD
    for name, loss in losses.items():
        text += f"| {name} | {loss:.4f} | {loss - losses['float32']:+.4f} |\n"
    return text + read_section() + TAIL


def read_losses() -> dict[str, float]:
    """How much more than in float32 the page says that the demo model's loss is, by format."""
    rows = re.findall(r"^\| ([\w ]+) \| [\d.]+ \| ([-+][\d.]+) \|$", PAGE.read_text("utf-8"), re.M)
    return {name: float(more) for name, more in rows}


def read_page() -> dict[str, dict[str, str]]:
    """What the page says, by type and feature."""
    text = PAGE.read_text("utf-8")
    notes = dict(re.findall(r"^(\(\d+\)) (.+)\.$", text, re.MULTILINE))
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = {feature.title: name for name, feature in FEATURES.items()}
    head = [names.get(title, title) for title in table[0][1:]]
    return {
        row[0].strip("`"): {n: notes.get(c, c) for n, c in zip(head, row[1:], strict=True)}
        for row in table[2:]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Try every architecture with every feature.")
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="only these; the page keeps others"
    )
    asked = parser.parse_args().types or sorted(MODELS)
    if "TRITON_INTERPRET" not in os.environ:  # it is read where triton is first imported
        here = [sys.executable, "-m", "tests.models.matrix", *sys.argv[1:]]
        same = {"TRITON_INTERPRET": "1", "PYTHONHASHSEED": "0"}  # the latter of held-out texts
        os.execve(sys.executable, here, os.environ | same)
    results = read_page() if PAGE.exists() else {}
    results = {name: row for name, row in results.items() if name in MODELS}
    warnings.simplefilter("ignore")
    losses, has_failed = demo_losses(LOSS_TOKENS), False
    for model_type in asked:
        with tempfile.TemporaryDirectory() as folder:
            tried = write_tiny(Path(folder), model_type)
            try:
                found = {name: result(tried, feature) for name, feature in FEATURES.items()}
            except Exception as error:
                print(f"{model_type} fails: {error!r}", flush=True)
                has_failed = True
                continue
        results[model_type] = found
        print(model_type, *found.values(), sep="\t", flush=True)
        PAGE.write_text(page(results, losses), "utf-8")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()

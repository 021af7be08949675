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
LONG = 4  # number of long prompts; the short ones grow into windows
SHORTEST = 2  # index of the shortest long prompt
LENGTHS = (40, 33, 17, 24, *(1,) * 8)
NUM_TOKENS = 10
MAX_LEN = 56
SHARED = 32  # length of the common prefix of the first two prompts
LOSS_TOKENS = 20_000
LOSS_FORMATS = ("fp8", "int8", "int4", "int8 KV")
POOL_BLOCKS = 16  # of 4 tokens: too few for all requests together


class Refused(Exception):
    """quire refuses the feature by name."""


@dataclass(frozen=True)
class TinyCheckpoint:
    """A tiny random checkpoint of an architecture."""

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
        """transformers' trace and greedy tokens of each prompt, in float64."""
        theirs = Theirs(self.folder, self.spec, torch.float64, None)
        return [theirs.reference(prompt, NUM_TOKENS) for prompt in self.prompts]

    @cached_property
    def wanted(self) -> list[list[int]]:
        """The tokens that transformers chooses for each prompt."""
        return [each.tokens[each.num_prompt :] for each in self.references]

    def load(self, dtype: torch.dtype, formats: WeightFormats = IN_THE_DTYPE) -> Any:
        return load_model(self.folder, self.spec, dtype, CPU, LoadOptions(formats=formats))

    def logits(self, model: Any, how: str, paging: Paging, number: int = 0) -> torch.Tensor:
        """Return the logits of one prompt and transformers' tokens after it, [L, V]."""
        selected = way(how, self.references[number].tokens, self.spec.vocab_size)
        return trace(model, self.spec, selected, paging)[LOGITS]

    def check_logits(
        self, how: str, paging: Paging, bound: float, numbers: Sequence[int] = range(LONG)
    ) -> None:
        """Compare the logits of the prompts at the indices `numbers` with transformers'."""
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
        """Check the engine's tokens of all prompts, each of which is sent `times` times."""
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


def float64(tiny: TinyCheckpoint) -> None:
    tiny.check_logits(AT_ONCE, exact_paging(), EXACT)
    tiny.check_engine(attention_backend="reference", enable_prefix_caching=False)


def chunks(tiny: TinyCheckpoint) -> None:
    tiny.check_logits(CHUNKS, exact_paging(), EXACT)
    tiny.check_logits(TOKEN_BY_TOKEN, exact_paging(), EXACT)
    tiny.check_engine(max_num_batched_tokens=7)


def prefix_hit(tiny: TinyCheckpoint) -> None:
    with tiny.open() as llm:
        first, again = tiny.generate(llm), tiny.generate(llm)
    assert chosen(first) == chosen(again) == tiny.wanted
    # Linear layers save a state where two prompts diverge. It serves later prompts, not the second.
    shared = 0 if tiny.spec.linear_layers else SHARED
    assert first[1].num_cached_tokens == shared, "of a prompt with the prefix of the first"
    assert all(output.num_cached_tokens for output in again[:LONG])


def preempted(mode: str) -> Callable[[TinyCheckpoint], None]:
    def feature(tiny: TinyCheckpoint) -> None:
        outputs = tiny.check_engine(
            times=2,
            preemption_mode=mode,
            kv_cache_memory_bytes=pool_bytes(tiny.folder, POOL_BLOCKS, 4),
            enable_prefix_caching=False,
        )
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics)

    return feature


def batch_invariance(tiny: TinyCheckpoint) -> None:
    """Check for equal bits alone and in a batch, on the backend that real models use."""
    if core() is None:
        raise Refused("it needs the C++ core")
    model = tiny.load(torch.float32)
    alone = tiny.logits(model, TOKEN_BY_TOKEN, cpu_paging(model))
    assert torch.equal(alone, tiny.logits(model, WITH_OTHER_ROWS, cpu_paging(model)))


def backend(name: str) -> Callable[[TinyCheckpoint], None]:
    def feature(tiny: TinyCheckpoint) -> None:
        if name == "triton":
            from benchmarks.gpu.interpreter import repair_interpreter  # it imports triton

            repair_interpreter()
        bound = BOUNDS[torch.float32]
        # Triton's interpreter takes seconds for each prompt.
        numbers = [SHORTEST] if name == "triton" else range(LONG)
        tiny.check_logits(WITH_OTHER_ROWS, Paging(4, name, torch.float32), bound, numbers)
        if name == "cpu":
            paging = cpu_paging(tiny.load(torch.float32))
            tiny.check_logits(WITH_OTHER_ROWS, paging, bound)

    return feature


def weights(name: str) -> Callable[[TinyCheckpoint], None]:
    """Compare with the same weights dequantised; require the same tokens alone and in a batch."""

    def feature(tiny: TinyCheckpoint) -> None:
        formats = weight_formats(ModelConfig(quantization=name))
        try:
            formats.check("float32", "cpu")
        except ConfigError as error:
            raise Refused(first_sentence(error)) from error
        packed, plain = tiny.load(torch.float32, formats), tiny.load(torch.float32)
        take_dequantised(plain, packed)
        wanted = tiny.logits(plain, AT_ONCE, Paging(4, "reference", torch.float32))
        got = tiny.logits(packed, WITH_OTHER_ROWS, cpu_paging(packed))
        check_near(got, wanted, LOSSY)
        check_stable(tiny, quantization=name)

    return feature


def kv_int8(tiny: TinyCheckpoint) -> None:
    paging = cpu_paging(tiny.load(torch.float32), "int8")
    tiny.check_logits(WITH_OTHER_ROWS, paging, LOSSY)
    check_stable(tiny, kv_cache_dtype="int8")


def check_stable(tiny: TinyCheckpoint, **settings: Any) -> None:
    """Check that a prompt has the same tokens alone and in a batch."""
    own = {"dtype": "float32", "attention_backend": "cpu", "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with tiny.open(**(own | settings)) as llm:
        together = chosen(tiny.generate(llm))
        alone = [chosen(llm.generate([p], params, use_tqdm=False))[0] for p in tiny.prompts]
    assert together == alone


def gguf(tiny: TinyCheckpoint) -> None:
    """Use the first variant that a GGUF file can express."""
    kind = tiny.spec.model_type
    variant = next((name for name in CONVERTIBLE if VARIANTS[name][0] == kind), None)
    if variant is None:
        architecture = model_metadata(tiny.spec.raw)["general.architecture"]
        assert architecture not in GGUF_ARCHITECTURES, "no variant of it is convertible"
        raise Refused("GGUF files of this type do not load")
    tiny = TinyCheckpoint(convertible(tiny.folder / "gguf", variant).directory)
    path = convert(tiny.folder, tiny.folder / "model.gguf")
    spec, reference = load_spec(path).served_up_to(MAX_LEN), tiny.references[0]
    model = load_model(path, spec, torch.float64, CPU)
    got = trace(model, spec, way(CHUNKS, reference.tokens, spec.vocab_size), exact_paging())
    check_near(got[LOGITS], reference.trace[LOGITS], 1e-5)  # epsilons are stored in float32


def exact_paging() -> Paging:
    return Paging(4, "reference", torch.float64)


def cpu_paging(model: Any, kv_format: str = "auto") -> Paging:
    """Return the paging of an engine on a CPU: one call runs the model where the core can."""
    native = runs_in_one_call(model)
    return Paging(4, "cpu", torch.float32, kv_format=kv_format, native=native)


def first_sentence(error: Exception) -> str:
    return re.split(r"[;.] ", str(error))[0].rstrip(".")


@dataclass(frozen=True)
class Feature:
    """title: of its column. means: what is checked. quick: the type that `make test` uses."""

    title: str
    means: str
    check: Callable[[TinyCheckpoint], None]
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
    """Return the variant that represents a type: the first."""
    return next(name for name, (kind, _) in VARIANTS.items() if kind == model_type)


def write_tiny(folder: Path, model_type: str) -> TinyCheckpoint:
    write_checkpoint(folder, variant_of(model_type))
    return TinyCheckpoint(folder)


def result(tiny: TinyCheckpoint, feature: Feature) -> str:
    """Return `yes`, or why the feature is refused."""
    try:
        feature.check(tiny)
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
    """Return the demo model's loss by format, in nats per token of held-out text."""
    with LLM("demo", **SETTINGS) as llm:
        texts = held_out_texts(num_tokens, llm.get_tokenizer())
    found = {}
    for format in chosen_formats(LOSS_FORMATS):
        with LLM("demo", **SETTINGS, **format.settings) as llm:
            found[format.name] = float(np.concatenate(token_costs(llm, texts)).mean())
    return found


def page(results: dict[str, dict[str, str]], losses: dict[str, float]) -> str:
    """Return the page for results by type and feature."""
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
    """Return the page's increases of the demo model's loss over float32, by format."""
    rows = re.findall(r"^\| ([\w ]+) \| [\d.]+ \| ([-+][\d.]+) \|$", PAGE.read_text("utf-8"), re.M)
    return {name: float(more) for name, more in rows}


def read_page() -> dict[str, dict[str, str]]:
    """Return the page's results, by type and feature."""
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
    selected = parser.parse_args().types or sorted(MODELS)
    if "TRITON_INTERPRET" not in os.environ:  # triton reads it at its first import
        command = [sys.executable, "-m", "tests.models.matrix", *sys.argv[1:]]
        # PYTHONHASHSEED fixes the held-out texts.
        variables = {"TRITON_INTERPRET": "1", "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, command, os.environ | variables)
    results = read_page() if PAGE.exists() else {}
    results = {name: row for name, row in results.items() if name in MODELS}
    warnings.simplefilter("ignore")
    losses, has_failed = demo_losses(LOSS_TOKENS), False
    for model_type in selected:
        with tempfile.TemporaryDirectory() as folder:
            tiny = write_tiny(Path(folder), model_type)
            try:
                found = {name: result(tiny, feature) for name, feature in FEATURES.items()}
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

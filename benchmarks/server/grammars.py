"""Measure the cost of grammars in a step: rows with a grammar, against the same rows without.

    python -m benchmarks.server.grammars

The vocabulary has 151,936 byte-level tokens: the demo model's, and words composed of its words. 64
rows write JSON of ten fields by eight schemas, each a different text. The device is a stub. A step
takes 20 ms, then it waits for its masks. Each row's next token is its text's, and the mask must
allow it. All else is the engine's own, llguidance included. Runs with and without grammars take
turns. The first masks of all rows count too, although no cache helps them.

The limit is a step that takes only the stub's time. Aims: less than 5 % slower with grammars than
without. Requests without a grammar are less than 1 % slower if others may have one.
"""

import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import quire
from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import dry_run
from quire.base.clock import MonotonicClock
from quire.base.masks import MaskPromise, TokenMasks
from quire.base.messages import Request
from quire.base.plan import Int32, Plan, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.attachments.grammars import GrammarAttachment
from quire.engine.executors.executor import Executor
from quire.engine.executors.threaded import ThreadedExecutor
from quire.engine.grammars.grammars import Grammars
from quire.engine.grammars.vocabulary import Vocabulary, make_vocabulary
from quire.engine.loop.core import EngineCore
from quire.render.grammars.lark import Lark
from quire.render.tokens.tokenizer import Tokenizer
from quire.tools.report import benchmark_parser, print_head

VOCAB_SIZE, NUM_PADDING = 151_936, 286
PROMPT_LEN, MAX_LEN = 16, 512
AIM, PLAIN_AIM = 0.05, 0.01
KINDS = ("string", "integer", "words", "date-time", "numbers", "colour", "email", "boolean")
COLOURS = ["red", "green", "blue", "yellow"]


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Return the demo model's tokenizer, extended to this size with words composed of its words."""
    demo = Path(quire.__file__).parent / "demo"
    state = json.loads((demo / "tokenizer.json").read_text("utf-8"))
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    ends = [token for token in vocab if len(token) > 1 and token.isascii() and token.isalpha()]
    begins = ends + [t for t in vocab if t[0] == "\u0120" and len(t) > 1 and t[1:].isalpha()]
    rng = random.Random(0)
    num = len(vocab) + sum(token["content"] not in vocab for token in state["added_tokens"])
    while num < vocab_size:
        first, second = rng.choice(begins), rng.choice(ends)
        if first + second not in vocab and len(first + second) < 16:
            vocab[first + second], num = num, num + 1
            merges.append([first, second] if isinstance(merges[0], list) else f"{first} {second}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
        return Tokenizer.from_directory(folder)


def schema_of(number: int) -> dict[str, object]:
    """Return a schema of ten fields, with another order and other names for each number."""
    types: dict[str, dict[str, object]] = {
        "string": {"type": "string", "maxLength": 60},
        "integer": {"type": "integer"},
        "words": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
        "date-time": {"type": "string", "format": "date-time"},
        "numbers": {"type": "array", "items": {"type": "number"}},
        "colour": {"enum": list(COLOURS)},
        "email": {"type": "string", "format": "email"},
        "boolean": {"type": "boolean"},
    }
    rng = random.Random(number)
    kinds = [*KINDS, "string", "integer"]
    rng.shuffle(kinds)
    fields = {f"field_{number}_{i}_{kind}": types[kind] for i, kind in enumerate(kinds)}
    return {"type": "object", "properties": fields, "required": list(fields)}


def answer_of(schema: dict[str, object], rng: random.Random) -> str:
    """Return a text that the schema describes."""
    sentence = " ".join(rng.choice(["the", "cat", "was", "happy", "and", "ran"]) for _ in range(9))
    made: dict[str, Callable[[], object]] = {
        "string": lambda: sentence,
        "integer": lambda: rng.randrange(10_000),
        "words": lambda: f"AB{rng.randrange(1000, 9999)}",
        "date-time": lambda: f"20{rng.randrange(10, 40)}-01-0{rng.randrange(1, 9)}T10:00:00Z",
        "numbers": lambda: [round(rng.random(), 3) for _ in range(3)],
        "colour": lambda: rng.choice(COLOURS),
        "email": lambda: f"a{rng.randrange(100)}@example.com",
        "boolean": lambda: rng.random() < 0.5,
    }
    names = list(schema["properties"])  # type: ignore[call-overload]
    return json.dumps({name: made[name.rpartition("_")[2]]() for name in names})


class ScriptedStub:
    """A step takes step_s; then it waits for the masks, and each row writes on in its text.
    texts: tokens, by the seed of the request."""

    def __init__(self, step_s: float, texts: list[list[int]]) -> None:
        self.step_s, self.texts = step_s, texts
        self.waited_s: list[float] = []  # for masks, after the step's own time
        self.began_s: list[float] = []
        self._results: deque[StepResult] = deque()
        self._at: dict[int, tuple[int, int]] = {}  # by row: which text, how much of it is written

    def start(self, on_result: Callable[[], None]) -> None:
        pass

    def copy_bytes_per_s(self) -> float:
        return 0.0

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self.began_s.append(time.perf_counter())
        for start in plan.started:
            self._at[start.row] = start.seed, len(start.token_ids) - PROMPT_LEN
        time.sleep(self.step_s)
        slept_s = time.perf_counter()
        found = None if masks is None else masks.wait()
        self.waited_s.append(time.perf_counter() - slept_s)
        chosen = np.zeros((len(plan.sample_rows), 1), np.int32)
        for i, row in enumerate(plan.sample_rows.tolist()):
            text, at = self._at[row]
            chosen[i] = self.texts[text][min(at, len(self.texts[text]) - 1)]
            self._at[row] = text, at + 1
        if found is not None:
            _check(found, plan, chosen[:, 0])
        accepted = np.ones(len(chosen), np.int32)
        self._results.append(StepResult(plan.step_id, chosen, accepted))

    def is_ready(self) -> bool:
        return len(self._results) > 0

    def next_result(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        pass


def _check(found: TokenMasks, plan: Plan, chosen: Int32) -> None:
    """Assert that the masks allow what was chosen. All rows have a grammar."""
    order = np.argsort(found.rows)
    mask_rows = order[np.searchsorted(found.rows, plan.sample_rows, sorter=order)]
    bits = found.words[mask_rows, 0, chosen // 32] >> (chosen % 32)
    assert (bits & 1).all(), "a mask does not allow what its grammar does"


@dataclass
class Load:
    """The same for all runs. grammars: by schema; texts: of the rows."""

    vocabulary: Vocabulary
    grammars: list[str]
    texts: list[list[int]]


@dataclass
class Measured:
    """The times of one run, in milliseconds.

    step: from the beginning of one step to the next, the mean.
    waited: the longest wait of a step for its masks.
    first: from the requests to the first token.
    """

    step: float
    waited: float
    first: float
    num_steps: int


def make_load(num_rows: int, vocab_size: int = VOCAB_SIZE) -> Load:
    tokenizer = make_tokenizer(vocab_size - NUM_PADDING)
    end = tokenizer.eos_token_id or 0
    schemas = [schema_of(number) for number in range(8)]
    rng = random.Random(1)
    texts = [
        [*tokenizer.encode(answer_of(schemas[i % 8], rng), add_special_tokens=False), end]
        for i in range(num_rows)
    ]
    begun = time.perf_counter()
    vocabulary = make_vocabulary(tokenizer, vocab_size, [end])
    print(f"making the vocabulary of {vocab_size:,} tokens: {time.perf_counter() - begun:.2f} s")
    grammars = []
    for schema in schemas:
        lark = Lark()
        grammars.append(lark.text(lark.json(schema)))
    return Load(vocabulary, grammars, texts)


def run(load: Load, kind: str, depth: int, step_s: float, num_threads: int) -> Measured:
    """Answer all requests once. kind: `without` grammars, `plain` requests where others could have
    one, or `grammars`."""
    num_rows = len(load.texts)
    stub = ScriptedStub(step_s, load.texts)
    config = SchedulerConfig(
        max_num_seqs=num_rows, max_num_batched_tokens=num_rows * PROMPT_LEN, pipeline_depth=depth
    )
    scheduler, _ = dry_run(num_rows * (MAX_LEN // 16 + 1), 16, config, MAX_LEN, True)
    executor: Executor = stub if depth == 1 else ThreadedExecutor(stub)
    limits = RequestLimits(load.vocabulary.size, MAX_LEN, 0, num_rows, takes_grammars=True)
    core = EngineCore(scheduler, executor, MonotonicClock(), limits)
    if kind != "without":
        size = load.vocabulary.size
        grammars = Grammars(lambda: load.vocabulary, size, num_threads, core.bell.ring)
        core.attach(GrammarAttachment(grammars))
    begun = time.perf_counter()
    for i, text in enumerate(load.texts):
        params = SamplingParams(temperature=0.0, max_tokens=MAX_LEN)
        grammar = load.grammars[i % len(load.grammars)] if kind == "grammars" else ""
        prompt = [i + 1] * PROMPT_LEN
        core.add(Request(str(i), prompt, params, i, stop_token_ids=text[-1:], grammar=grammar))  # type: ignore[arg-type]
    first_s = 0.0
    while core.has_work:
        outputs = core.step()
        first_s = first_s or (time.perf_counter() if outputs else 0.0)
    core.close()
    # All rows run in the first half of the steps; then the shortest answers end.
    began = stub.began_s
    steps = (began[-1] - began[0]) / (len(began) - 1)
    return Measured(steps * 1e3, max(stub.waited_s) * 1e3, (first_s - begun) * 1e3, len(began))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=1, help="that make masks")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print_head(f"what grammars cost a step of {arguments.step_ms:g} ms")
    load = make_load(arguments.rows)
    step_s, rows = arguments.step_ms / 1e3, []
    for depth in (1, 2):
        kinds = "without", "plain", "grammars"
        runs: dict[str, list[Measured]] = {kind: [] for kind in kinds}
        for _ in range(arguments.rounds):
            for kind in kinds:
                runs[kind].append(run(load, kind, depth, step_s, arguments.threads))
        steps = {kind: min(each.step for each in runs[kind]) for kind in kinds}
        print(f"depth {depth}, {arguments.rows} rows, {runs['without'][0].num_steps} steps:")
        print(f"  limit        {arguments.step_ms:7.3f} ms a step")
        for kind, aim in (("without", 0.0), ("plain", PLAIN_AIM), ("grammars", AIM)):
            slower = steps[kind] / steps["without"] - 1
            change = f"  {slower:+.2%} (aim: below {aim:.0%})" if aim else ""
            waited = statistics.median(each.waited for each in runs[kind])
            first = statistics.median(each.first for each in runs[kind])
            print(
                f"  {kind:12} {steps[kind]:7.3f} ms a step; longest wait for masks {waited:6.2f}"
                f" ms, first token after {first:6.1f} ms{change}"
            )
            rows.append(
                {"depth": depth, "kind": kind, "step_ms": steps[kind], "slower": slower,
                 "aim": aim or None, "waited_ms": waited, "first_token_ms": first}
            )  # fmt: skip
    write(arguments.output_json, "server.grammars", rows, options_of(arguments))


if __name__ == "__main__":
    main()

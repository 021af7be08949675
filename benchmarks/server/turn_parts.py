"""Measure the CPU time of each part of a turn's start, without a server and without a model.

    python -m benchmarks.server.turn_parts

A conversation of 16,000 tokens is known, and its next message has about 500. The client sends all
of it again. The tokenizer is a byte-level BPE with Qwen's rule for words, trained on the
documentation; it has 3.5 characters per token. Each part runs alone, in this process, on the
production code. A figure is the median of several turns, in milliseconds of this thread's CPU time.

body        the JSON body becomes a checked object
template    the job is packed, rendered as in the template's process, and comes back as text
tokens      tokenization, with known parts from earlier turns
request     the request is made, checked and encoded for the socket
core        the core decodes and checks it
add         the scheduler takes it
schedule    the scheduler finds its blocks by name, admits it, and makes its plan
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from benchmarks.virtual.dry_run import RandomExecutor, dry_run
from quire.base.messages import Request
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import ModelConfig, SchedulerConfig
from quire.engine.start.text import TextSide, build_text_side
from quire.engine.wire.wire import client_codec, core_codec
from quire.models.checkpoint.source import TEXT_FILES, resolve_model
from quire.render.renderer import RenderedPrompt
from quire.render.templates.chat_template import ChatOptions
from quire.render.templates.template_job import TemplateJob
from quire.render.templates.template_worker import InThisProcess, unpack
from quire.render.tokens.pre_tokenizers import QWEN2
from quire.render.tokens.tokenizer import Tokenizer
from quire.scheduler.scheduler import Scheduler
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.bodies.reading import read_json
from quire.tools.report import benchmark_parser, print_head

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))
TEMPLATE = ROOT / "src" / "quire" / "demo" / "chat_template.jinja"
SPECIAL = ("<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 16_000
QUESTION_CHARS, ANSWER_CHARS = 2000, 400  # of the messages of a known conversation
NUM_HELD, NUM_NEW = 16_000, 500  # tokens
BLOCK_SIZE = 16
ROUNDS = 9
PARTS = ("body", "template", "tokens", "request", "core", "add", "schedule")

Message = dict[str, str]
T = TypeVar("T")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of a model's usual kind, with the demo model's chat template."""
    backend = Backend(models.BPE())
    words = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([path.read_text("utf-8") for path in DOCUMENTS], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text("utf-8"))


def text_of(tokenizer: str) -> TextSide:
    """Return the text side of the demo model with this tokenizer."""
    config = ModelConfig(model="demo", tokenizer=tokenizer)
    return build_text_side(config, resolve_model("demo", files=TEXT_FILES))


class Texts:
    """Pieces of the documentation, each given out once. Sizes are in tokens of a tokenizer, as it
    needs on average."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._source = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
        sample = self._source[: 1 << 16]
        self._chars_per_token = len(sample) / len(tokenizer.encode(sample, False))
        self._position = 0

    def take(self, num_tokens: int) -> str:
        """Return the next text of about this many tokens."""
        return self._take_chars(round(num_tokens * self._chars_per_token))

    def conversation(self, num_tokens: int) -> list[Message]:
        """Return messages of about this many tokens in all, ending with an answer."""
        num_chars = round(num_tokens * self._chars_per_token)
        messages: list[Message] = []
        for _ in range(max(1, num_chars // (QUESTION_CHARS + ANSWER_CHARS))):
            messages.append({"role": "user", "content": self._take_chars(QUESTION_CHARS)})
            messages.append({"role": "assistant", "content": self._take_chars(ANSWER_CHARS)})
        return messages

    def _take_chars(self, num: int) -> str:
        start, self._position = self._position, self._position + num
        if self._position > len(self._source):
            raise ValueError("the documentation is too short for so many texts; lower the sizes.")
        return self._source[start : self._position]


def turn_of(messages: list[Message], text: str) -> list[Message]:
    """Return a conversation with one more message."""
    return [*messages, {"role": "user", "content": text}]


def body_of(messages: list[Message], model: str) -> bytes:
    """Return the body of a chat request for one token."""
    fields = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0.0}
    more = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(fields | more).encode()


@dataclass
class CpuTimes:
    """CPU milliseconds of this thread by part, one for each turn."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, part: str, work: Callable[[], T]) -> T:
        """Do some work, and add its time to a part."""
        began = time.thread_time()
        found = work()
        self.parts.setdefault(part, []).append((time.thread_time() - began) * 1e3)
        return found

    def medians(self) -> dict[str, float]:
        """Return the median of each part."""
        return {part: statistics.median(times) for part, times in self.parts.items()}


class TurnParts:
    """All parts of a turn, from its body to its plan."""

    def __init__(self, text: TextSide, max_model_len: int) -> None:
        assert text.tokenizer is not None, "a chat needs a tokenizer"
        self._text, self._tokenizer = text, text.tokenizer
        self._templates = InThisProcess()
        self._limits = RequestLimits(self._tokenizer.vocab_size, max_model_len, 20, 64)
        self._to_core, self._in_core = client_codec(), core_codec()
        self._num_requests = 0
        config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096)
        num_blocks = 2 * max_model_len // BLOCK_SIZE
        self._scheduler, self._executor = dry_run(
            num_blocks, BLOCK_SIZE, config, max_model_len, True
        )

    def run(self, body: bytes, times: CpuTimes) -> tuple[int, int]:
        """Run all parts of a turn. Return the tokens of its prompt, and how many were cached."""
        found = times.measure("body", lambda: self._body(body))
        text = times.measure("template", lambda: self._render(found))
        token_ids = times.measure("tokens", lambda: self._tokenize(text))
        data = times.measure("request", lambda: self._request(RenderedPrompt(token_ids, text)))
        request = times.measure("core", lambda: self._decode(data))
        scheduler = self._scheduler
        times.measure("add", lambda: scheduler.add(request, 0.0))
        plan = times.measure("schedule", lambda: scheduler.schedule(0.0).plan)
        assert plan is not None, "a new request gets a plan"
        num_cached = int(plan.started[0].num_computed_tokens)
        _finish(scheduler, self._executor, plan)
        return len(token_ids), num_cached

    def _body(self, data: bytes) -> ChatCompletionRequest:
        return ChatCompletionRequest.model_validate(read_json(data, "the body"))

    def _render(self, body: ChatCompletionRequest) -> str:
        source, named = self._tokenizer.chat_template, self._tokenizer.named_tokens
        assert source is not None, "the model has a chat template"
        job = unpack(TemplateJob(source, named, body.messages, ChatOptions()).pack())
        return self._templates.render(job).encode("utf-8").decode("utf-8")

    def _tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False)

    def _request(self, prompt: RenderedPrompt) -> bytes:
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._num_requests += 1
        request = self._text.requests.make(prompt, params, f"turn-{self._num_requests}")
        self._limits.check(request)
        return self._to_core.encode(request)

    def _decode(self, data: bytes) -> Request:
        request = self._in_core.decode(memoryview(data)[4:])
        assert isinstance(request, Request), "only requests are sent"
        self._limits.check(request)
        return request


def _finish(scheduler: Scheduler, executor: RandomExecutor, plan: Any) -> None:
    """Carry out a plan and all later ones until no request is left."""
    while plan is not None:
        executor.submit(plan)
        scheduler.update(executor.next_result(), 0.0)
        plan = scheduler.schedule(0.0).plan


def turns_of(text: TextSide, num_held: int, num_new: int, rounds: int) -> Iterator[list[Message]]:
    """Yield the known conversation, then `rounds` turns that each continue it differently."""
    assert text.tokenizer is not None, "a chat needs a tokenizer"
    texts = Texts(text.tokenizer)
    messages = texts.conversation(num_held)
    yield turn_of(messages, "Begin.")
    for _ in range(rounds):
        yield turn_of(messages, texts.take(num_new))


def measure(
    tokenizer: str, num_held: int, num_new: int, rounds: int
) -> tuple[CpuTimes, dict[str, int]]:
    """Return the times of the turns, and the sizes of the last one."""
    text = text_of(tokenizer)
    parts, times = TurnParts(text, 2 * (num_held + num_new) + 1024), CpuTimes()
    sizes: dict[str, int] = {}
    for number, messages in enumerate(turns_of(text, num_held, num_new, rounds + 1)):
        body = body_of(messages, "demo")
        num_prompt, num_cached = parts.run(body, times if number > 1 else CpuTimes())
        sizes = {"body_bytes": len(body), "prompt_tokens": num_prompt, "cached_tokens": num_cached}
    return times, sizes


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--held", type=int, default=NUM_HELD, help="known tokens")
    parser.add_argument("--new", type=int, default=NUM_NEW, help="new tokens of a turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print_head("parts of a turn's start, CPU milliseconds")
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        times, sizes = measure(folder, options.held, options.new, options.rounds)
    medians = times.medians()
    print(", ".join(f"{name} {value:,}" for name, value in sizes.items()))
    for part in PARTS:
        print(f"{part:>10} {medians[part]:7.2f}")
    print(f"{'all':>10} {sum(medians.values()):7.2f}")


if __name__ == "__main__":
    main()

"""An engine whose device obeys real masks of a real grammar, over a vocabulary of fifty tokens."""

import tempfile
import zlib
from functools import cache
from typing import Any

import numpy as np

from quire.base.clock import FakeClock
from quire.base.messages import Request
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.base.step_outputs import SequenceUpdate
from quire.engine.attachments.grammars import GrammarAttachment
from quire.engine.client.output import StepReader
from quire.engine.executors.executor import Executor
from quire.engine.executors.threaded import ThreadedExecutor
from quire.engine.grammars.grammars import Grammars
from quire.engine.grammars.vocabulary import Vocabulary, make_vocabulary, num_words
from quire.engine.loop.core import EngineCore
from quire.kv.manager import KVManager
from quire.render.tokens.tokenizer import Tokenizer
from quire.scheduler.beams import BeamSearch
from quire.scheduler.core.memory import Memory
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler_machine import BLOCK, FULL, MAX_LEN
from tests.support.engine.updates import read, run_to_end
from tests.support.scheduler.fake_device import (
    VOCAB,
    FakeDevice,
    FakeExecutor,
    candidates_of,
    expected_tokens,
    make_request,
    next_token,
)

END = 49
CHARS = [*"abcdefhlnorstu", *"0123456789", *'{}[]:," .-/']
PAIRS = [
    ("a", "b"), ("ab", "c"), ("b", "c"), ("d", "e"), ("{", '"'), ('"', ":"), ('"', ","),
    ("1", "2"), (" ", " "), ("}", "}"), ("t", "r"), ("tr", "u"), ("tru", "e"), ("a", "l"),
]  # fmt: skip
TEXTS = CHARS + [first + second for first, second in PAIRS]


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, of 49 tokens and an end; the model's table has as many."""
    import tokenizers as tk

    assert len(TEXTS) == END, len(TEXTS)
    shown = [text.replace(" ", "\u0120") for text in TEXTS]
    merges = [(a.replace(" ", "\u0120"), b.replace(" ", "\u0120")) for a, b in PAIRS]
    backend = tk.Tokenizer(tk.models.BPE({text: i for i, text in enumerate(shown)}, merges))
    backend.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tk.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        return Tokenizer.from_directory(folder)


@cache
def vocabulary() -> Vocabulary:
    return make_vocabulary(tokenizer(), VOCAB, [END])


def lark(start: str) -> str:
    return f"%llguidance {{}}\nstart: {start}\n"


def allowed_ids(words: Any) -> list[int]:
    """The tokens of one mask."""
    bits = np.unpackbits(np.asarray(words, np.int32).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def reference(request: Request) -> list[int]:
    """The answer that the device gives when a new matcher says at each token what is allowed."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary().tokens, request.grammar)
    context, output = list(request.prompt_token_ids), []
    most = min(request.params.max_tokens or MAX_LEN, MAX_LEN - len(context))
    while len(output) < most and (not output or output[-1] not in request.stop_token_ids):
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: num_words(VOCAB)]
        output.append(next_token(context, allowed_ids(words)))
        context.append(output[-1])
        assert matcher.consume_token(output[-1])
    return output


def reference_beams(request: Request) -> list[list[int]]:
    """The results of a search whose beams each ask a matcher of their own."""
    from llguidance import LLMatcher

    params, prompt = request.params, list(request.prompt_token_ids)
    most = min(params.max_tokens or MAX_LEN, MAX_LEN - len(prompt))
    search = BeamSearch(params.num_samples, most, frozenset(request.stop_token_ids))
    outputs: list[list[int]] = [[]]
    while not search.is_over:
        found = []
        for output in outputs:
            matcher = LLMatcher(vocabulary().tokens, request.grammar)
            assert matcher.consume_tokens(output)
            words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: num_words(VOCAB)]
            context = prompt + output
            found.append(candidates_of(context, search.num_kept, allowed_ids(words)))
        alive = search.advance(found, outputs)
        outputs = [[*outputs[beam.parent], beam.token_id] for beam in alive]
    return [list(result.token_ids) for result in search.hypotheses(params.n)]


def text_of(token_ids: list[int]) -> str:
    return "".join(TEXTS[t] for t in token_ids if t != END)


class GuidedBench:
    """num_blocks: so few that some must give way."""

    def __init__(
        self, depth: int = 1, is_threaded: bool = False, num_blocks: int = 40, **settings: Any
    ) -> None:
        assert is_threaded or depth == 1, "whoever computes inside `submit` takes one plan"
        config = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=24, pipeline_depth=depth, **settings
        )
        kv = KVManager((FULL,), (num_blocks,), BLOCK, True)
        self.scheduler = Scheduler(Memory(kv, 24, watermark=0.0), config, MAX_LEN)
        host_blocks = tuple(pool.num_blocks for pool in kv.host_pools)
        self.device = FakeDevice((FULL,), (num_blocks,), BLOCK, host_blocks)
        self.device.waits_for_masks = True
        executor: Executor = FakeExecutor(self.device, is_lazy=False)
        if is_threaded:
            executor = ThreadedExecutor(executor)
        limits = RequestLimits(VOCAB, MAX_LEN, 0, 1 << 20, takes_grammars=True)
        self.core = EngineCore(self.scheduler, executor, FakeClock(), limits)
        self.num_made = 0
        self.grammars = Grammars(self._make, VOCAB, 1, self.core.bell.ring)
        self.core.attach(GrammarAttachment(self.grammars))
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], SequenceUpdate] = {}
        self.reader = StepReader()

    def _make(self) -> Vocabulary:
        self.num_made += 1
        return vocabulary()

    def add(self, name: str, grammar: str, length: int = 5, **more: Any) -> Request:
        prompt = np.random.default_rng(zlib.crc32(name.encode())).integers(0, END, length)
        more = {"stops": (END,), "seed": len(self.requests), "grammar": grammar} | more
        request = self.requests[name] = make_request(name, prompt.tolist(), **more)
        self.core.add(request)
        return request

    def step(self) -> None:
        for update in read(self.reader, self.core.step()):
            key = update.request_id, update.index
            self.tokens.setdefault(key, []).extend(update.token_ids)
            for i, beam in enumerate(update.beams or ()):
                self.tokens[update.request_id, i] = beam.token_ids
            if update.finish is not None:
                self.ends[key] = update
        self.scheduler.check_invariants()

    def finish(self) -> None:
        run_to_end(self.core, self.step)
        assert self.grammars.num_followed == 0, "a grammar is still followed"
        assert all(pool.num_used == 0 for pool in self.scheduler.memory.kv.pools)

    def assert_exact(self) -> None:
        for name, request in self.requests.items():
            found = [self.tokens[key] for key in sorted(self.tokens) if key[0] == name]
            if request.params.use_beam_search:
                assert found == reference_beams(request), name
            elif request.grammar:
                assert found == [reference(request)] * request.params.n, name
            else:
                assert found == [expected_tokens(request, MAX_LEN)] * request.params.n, name

"""Long texts next to an event loop: the order of the queues, and rejected texts."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from quire.base.errors import EngineBusy, RequestError
from quire.render.renderer import Renderer
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import TokenizerFiles
from quire.serve.async_renderer import (
    MAX_CHARS_ON_LOOP,
    MAX_CHARS_SHORT,
    NUM_SHORT_THREADS,
    USUAL_CHARS_PER_TOKEN,
    AsyncRenderer,
    TextThreads,
)
from tests.support.render import golden_vocabularies as vocabularies
from tests.support.render import tiny_tokenizers as tiny

SHORT, LONG = MAX_CHARS_ON_LOOP + 1, MAX_CHARS_SHORT + 1


def waiting_work(gate: threading.Event) -> Callable[[], int]:
    def work() -> int:
        assert gate.wait(30)
        return threading.get_ident()

    return work


def test_small_work_runs_on_the_loop_without_waiting() -> None:
    async def go() -> None:
        text_threads, gate = TextThreads(), threading.Event()
        sizes = [LONG, LONG, *[SHORT] * (NUM_SHORT_THREADS + 1)]
        blocked = [
            asyncio.create_task(text_threads.run(size, waiting_work(gate))) for size in sizes
        ]
        await asyncio.sleep(0)
        assert (
            await text_threads.run(MAX_CHARS_ON_LOOP, threading.get_ident) == threading.get_ident()
        )
        gate.set()
        assert threading.get_ident() not in await asyncio.gather(*blocked)

    asyncio.run(go())


def test_short_texts_do_not_wait_for_long_ones() -> None:
    async def go() -> None:
        text_threads, gate = TextThreads(), threading.Event()
        blocked = [
            asyncio.create_task(text_threads.run(LONG, waiting_work(gate))) for _ in range(3)
        ]
        await asyncio.sleep(0)
        assert await text_threads.run(SHORT, lambda: "done") == "done"
        assert not any(task.done() for task in blocked)
        gate.set()
        assert len(set(await asyncio.gather(*blocked))) == 1  # one after the other

    asyncio.run(go())


def test_open_texts_are_bounded_and_released() -> None:
    async def go() -> None:
        text_threads, gate = TextThreads(max_open_chars=3 * SHORT), threading.Event()
        blocked = [
            asyncio.create_task(text_threads.run(SHORT, waiting_work(gate))) for _ in range(3)
        ]
        await asyncio.sleep(0)
        assert (text_threads.num_open, text_threads.num_open_chars) == (3, 3 * SHORT)
        with pytest.raises(EngineBusy, match="3 long prompts"):
            await text_threads.run(SHORT, threading.get_ident)
        blocked[0].cancel()  # its work continues, and its text counts until the end
        await asyncio.gather(blocked[0], return_exceptions=True)
        with pytest.raises(EngineBusy):
            await text_threads.run(SHORT, threading.get_ident)
        gate.set()
        await asyncio.gather(*blocked, return_exceptions=True)
        assert await text_threads.run(SHORT, lambda: "again") == "again"
        assert await TextThreads(max_open_chars=1).run(LONG, lambda: "alone") == "alone"

    asyncio.run(go())


def test_errors_of_the_work_are_raised() -> None:
    async def go() -> None:
        text_threads = TextThreads()
        for size in (1, SHORT, LONG):
            with pytest.raises(ZeroDivisionError):
                await text_threads.run(size, divmod, 1, 0)

    asyncio.run(go())


class CountedTokenizer:
    """A fake tokenizer with one token per character that counts its calls."""

    def __init__(self) -> None:
        self.bound = self
        self.num_bounds = self.num_encoded = 0

    def at_least(self, text: str) -> int:
        self.num_bounds += 1
        return len(text)

    def num_new_chars(self, text: str) -> int:
        return len(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        return [0] * len(text)


def test_token_bound_is_computed_only_for_texts_that_may_be_too_long() -> None:
    tokenizer, limit = CountedTokenizer(), 1000
    renderer = AsyncRenderer(Renderer(tokenizer), TextThreads())  # type: ignore[arg-type]

    def render(num_chars: int) -> None:
        asyncio.run(renderer.render("a" * num_chars, max_tokens=limit))

    render(limit)
    assert (tokenizer.num_bounds, tokenizer.num_encoded) == (0, 1)
    usual = limit * USUAL_CHARS_PER_TOKEN
    for num_chars, num_encoded in ((limit + 1, 2), (usual, 3), (usual + 1, 3)):
        with pytest.raises(RequestError, match=f"are {num_chars} tokens or more"):
            render(num_chars)
        assert tokenizer.num_encoded == num_encoded  # the longest text is rejected before


def test_known_text_with_a_short_suffix_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(vocabularies.qwen3(), TokenizerFiles(tiny.directory("llama")))
    renderer = AsyncRenderer(Renderer(tokenizer), TextThreads())
    encode, threads = tokenizer.encode, list[int]()

    def noted(text: str, special: bool) -> list[int]:
        threads.append(threading.get_ident())
        return encode(text, special)

    monkeypatch.setattr(tokenizer, "encode", noted)
    known, short = "the fox jumps over a dog " * 1000, "and a cat " * 10
    long = "and a bird " * MAX_CHARS_ON_LOOP
    for text in (known, known + short, known + long):
        found = asyncio.run(renderer.render(text))
        assert found.token_ids == encode(text, True)
    is_on_loop = [each == threading.get_ident() for each in threads]
    assert is_on_loop == [False, True, False]

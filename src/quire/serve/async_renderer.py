"""Turn prompts into token ids without blocking the event loop: `TextThreads` and `AsyncRenderer`.

Short texts, and texts with few new characters, are processed on the loop. Longer texts go to
threads, and the longest texts to a thread of their own, so short texts never queue behind long
ones. Each lane is FIFO. Texts in work and in queues take memory, so their number and size are
bounded. Chat templates run in other processes.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, EngineBusy, RequestError
from quire.render.renderer import Media, RenderedPrompt, Renderer, is_conversation
from quire.render.templates.chat_template import ChatOptions

P = ParamSpec("P")
T = TypeVar("T")

# Texts up to this size are processed on the event loop, in a few milliseconds at most.
MAX_CHARS_ON_LOOP = 4096
MAX_KNOWN_ON_LOOP = 1 << 17  # characters of a text of which only MAX_CHARS_ON_LOOP are new
MAX_VALUES_ON_LOOP = 2048  # of a conversation whose characters are counted on the event loop
# A text with up to this many characters per possible token is tokenized first. If it fits, which is
# usual, the lower bound of its tokens is not needed.
USUAL_CHARS_PER_TOKEN = 4
MAX_CHARS_SHORT = 1 << 18
NUM_SHORT_THREADS = 2
# Bounds of all texts in work or in a queue.
MAX_OPEN_CHARS = 1 << 26
MAX_OPEN = 1024


class TextThreads:
    """Thread pools for text work, which bound the number and the characters of open texts. A text
    beyond the bounds is refused, unless no other text is open."""

    def __init__(self, max_open_chars: float = MAX_OPEN_CHARS, max_open: float = MAX_OPEN) -> None:
        self._max_open_chars = max_open_chars
        self._max_open = max_open
        self._lock = threading.Lock()
        self._short = ThreadPoolExecutor(NUM_SHORT_THREADS, "text")
        self._long = ThreadPoolExecutor(1, "long-text")
        self.num_open = 0  # texts in work or in a queue
        self.num_open_chars = 0  # characters of these texts

    async def run(
        self, num_chars: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` on a text of `num_chars` characters, on the loop or in a thread. Raises
        EngineBusy if the open texts are at their bound. Errors of `work` are raised unchanged."""
        if num_chars <= MAX_CHARS_ON_LOOP:
            return work(*args, **kwargs)
        self._open(num_chars)
        lane = self._short if num_chars <= MAX_CHARS_SHORT else self._long
        future: Future[T] = lane.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._close(num_chars))  # even if cancelled
        return await asyncio.wrap_future(future)

    def _open(self, num_chars: int) -> None:
        with self._lock:
            is_full = self.num_open_chars + num_chars > self._max_open_chars
            if self.num_open and (is_full or self.num_open >= self._max_open):
                raise EngineBusy(
                    f"{self.num_open} long prompts with {self.num_open_chars} characters are being"
                    " processed or waiting; try again later."
                )
            self.num_open += 1
            self.num_open_chars += num_chars

    def _close(self, num_chars: int) -> None:
        with self._lock:
            self.num_open -= 1
            self.num_open_chars -= num_chars


INT64 = 2**63


class AsyncRenderer:
    """Renderer that runs its long work in the threads of `TextThreads`."""

    def __init__(self, renderer: Renderer, text_threads: TextThreads) -> None:
        self._renderer = renderer
        self._text_threads = text_threads

    async def render(
        self,
        prompt: object,
        options: ChatOptions | None = None,
        template: str | None = None,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        media: Media = (),
    ) -> RenderedPrompt:
        """Render a prompt as `Renderer.render` does, without blocking the event loop.

        max_tokens: limit for an early check. A text that certainly exceeds it is refused with
        CONTEXT_LENGTH_EXCEEDED, a long one before tokenization. The caller must check the exact
        length.
        Raises RequestError for a bad prompt, EngineBusy if the open texts are at their bound.
        """
        field = "prompt"
        if is_conversation(prompt):
            field = "messages"
            prompt = await self._renderer.chat_text_async(prompt, options, template)
            add_special_tokens = False
        num_chars = size_of(prompt, MAX_CHARS_ON_LOOP)
        if num_chars > MAX_CHARS_ON_LOOP:  # an exact count is slow for unusual prompts only
            num_chars = len(prompt) if isinstance(prompt, str | list) else size_of(prompt)
        if isinstance(prompt, str) and not media and num_chars <= MAX_KNOWN_ON_LOOP:
            num_chars = self._num_chars_to_tokenize(prompt)

        def rendered() -> RenderedPrompt:
            text = prompt if isinstance(prompt, str) else ""
            limit = math.inf if max_tokens is None else max_tokens
            is_long = len(text) > USUAL_CHARS_PER_TOKEN * limit
            if is_long:
                self._check_length(text, limit, field)
            found = self._renderer.render(prompt, None, None, add_special_tokens, media)
            if not is_long and len(found.token_ids) > limit:
                self._check_length(text, limit, field)
            return found

        return await self._text_threads.run(max(num_chars, 1), rendered)

    def _num_chars_to_tokenize(self, text: str) -> int:
        """Return the number of new characters if they are few, else the length of the text."""
        tokenizer = self._renderer.tokenizer
        num = len(text) if tokenizer is None else tokenizer.num_new_chars(text)
        return num if num <= MAX_CHARS_ON_LOOP else len(text)

    def _check_length(self, text: str, max_tokens: float, field: str) -> None:
        tokenizer = self._renderer.tokenizer
        bound = None if tokenizer is None else tokenizer.bound
        at_least = 0 if bound is None else bound.at_least(text)
        if at_least > max_tokens:
            raise RequestError(
                f"the prompt has {len(text)} characters, which are {at_least} tokens or more; at"
                f" most {max_tokens} are possible here; shorten it.",
                field,
                CONTEXT_LENGTH_EXCEEDED,
            )


def size_of(prompt: object, enough: float = math.inf) -> int:
    """Return the approximate number of characters of a prompt, nested values and keys included. In
    lists of token ids, each number counts as one. Counting stops once it exceeds `enough`."""
    total = size_within(prompt, enough, math.inf)
    assert total is not None, "the number of values has no limit"
    return total


def size_within(prompt: object, enough: float, max_values: float) -> int | None:
    """Return the size as `size_of` does, or None if more than max_values nested values would be
    counted."""
    total, rest = 0, [prompt]
    while rest and total <= enough:
        value = rest.pop()
        if isinstance(value, str):
            total += len(value)
            continue
        if isinstance(value, Mapping | Sequence):
            max_values -= len(value)
            if max_values < 0:
                return None
        if isinstance(value, Mapping):
            total += sum(map(len, value)) + len(value)
            rest.extend(value.values())
        elif isinstance(value, Sequence):
            total += len(value)
            if total <= enough and not _is_ids(value):
                rest.extend(value)
        elif isinstance(value, int):
            total += value.bit_length() // 3  # about its decimal digits
    return total


def _is_ids(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int} and max(map(abs, values)) <= INT64

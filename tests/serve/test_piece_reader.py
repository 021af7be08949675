"""Prompts sent to `AsyncLLM` in pieces: the answers of whole prompts, and all kinds of end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import EngineDead, RequestError
from tests.serve.test_async_llm import FOX, SETTINGS, idle, last, params, run
from tests.support.models.reference_checkpoints import MAX_POSITION, checkpoint, text_checkpoint

TEXT = "The quick brown fox\njumps  over, 17 + 25 lazy dogs"
IDS = [5 + i % 60 for i in range(50)]
WORDS = [{"prompt": word} for word in TEXT.partition("fox")]
# Pieces of a prompt, and the whole prompt.
SAME: list[tuple[list[Any], Any]] = [
    ([TEXT], TEXT),
    (list(TEXT), TEXT),
    (WORDS, TEXT),
    (["", *WORDS[:2], "", WORDS[2], ""], TEXT),
    ([IDS], IDS),
    ([[], *([i] for i in IDS), []], IDS),
    ([IDS[:20], {"prompt_token_ids": IDS[20:]}], IDS),
    ([{"prompt_token_ids": tuple(IDS[:20])}, {"prompt_token_ids": []}, IDS[20:]], IDS),
]


async def each(pieces: list[Any]) -> AsyncIterator[Any]:
    for piece in pieces:
        yield piece


class Source:
    """Yields pieces, and those of `then` once `may_resume` is set. `waits` is set while it waits
    for that, `has_ended` when it is closed."""

    def __init__(self, pieces: list[Any], then: Callable[[], list[Any]] = list) -> None:
        self.pieces, self.then = pieces, then
        self.waits, self.may_resume, self.has_ended = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.was_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            for piece in self.pieces:
                yield piece
            self.waits.set()
            await self.may_resume.wait()
            for piece in self.then():
                yield piece
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.has_ended.set()


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(text_checkpoint()), **SETTINGS)
    yield engine
    engine.shutdown()


def fail(error: BaseException) -> Callable[[], list[Any]]:
    def then() -> list[Any]:
        raise error

    return then


# ---- answers -----------------------------------------------------------------------------------


def test_pieces_give_the_same_answer_as_the_whole_prompt(llm: AsyncLLM) -> None:
    sampled = [params(temperature=0.9, seed=i, logprobs=2) for i in range(len(SAME))]
    with LLM(str(text_checkpoint()), **SETTINGS) as offline:
        whole = [prompt for _, prompt in SAME]
        expected = offline.generate(whole, sampled, use_tqdm=False)

    async def program() -> None:
        calls = [
            last(llm.generate(each(pieces), own))
            for (pieces, _), own in zip(SAME, sampled, strict=True)
        ]
        for got, wanted in zip(await asyncio.gather(*calls), expected, strict=True):
            assert got.outputs == wanted.outputs
            assert (got.prompt, got.prompt_token_ids) == (wanted.prompt, wanted.prompt_token_ids)
        await idle(llm)

    run(program)


def test_pieces_may_alternate_between_text_and_token_ids(llm: AsyncLLM) -> None:
    """Each text is tokenised separately. The prompt has no text if a piece has only token ids."""

    async def program() -> None:
        tokenizer = await llm.get_tokenizer()
        ids = [*tokenizer.encode(FOX), 9, 9, *tokenizer.encode(" jumps", False)]
        got = await last(llm.generate(each([FOX, [9, 9], " ju", "mps"]), params()))
        wanted = await last(llm.generate(ids, params()))
        assert got.prompt_token_ids == ids
        assert got.prompt is None
        assert got.outputs == wanted.outputs
        known = [FOX, {"prompt_token_ids": [9, 9], "prompt": "?"}, " jumps"]
        assert (await last(llm.generate(each(known), params()))).prompt == f"{FOX}? jumps"

    run(program)


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_output_kinds_work_with_pieces(llm: AsyncLLM, kind: str) -> None:
    async def program() -> None:
        wanted = await last(llm.generate(TEXT, params(20)))
        got = [o async for o in llm.generate(each(WORDS), params(20, kind))]
        assert "".join(output.outputs[0].text for output in got) == wanted.outputs[0].text
        assert all(output.prompt == TEXT for output in got)

    run(program)


def test_slow_iterator_delays_no_request_and_its_pieces_are_computed(llm: AsyncLLM) -> None:
    async def program() -> None:
        ids = [70 + i for i in range(50)]  # of no other test, so none is cached
        source = Source([ids[:30], ids[30:48]], lambda: [ids[48:]])
        slow = asyncio.create_task(last(llm.generate(source, params())))
        await source.waits.wait()
        shares = await last(llm.generate(ids, params()))
        assert shares.num_cached_tokens == 32  # two blocks of 16: the last token waits for more
        await asyncio.gather(*(last(llm.generate([7 + i, 3], params(30))) for i in range(8)))
        assert not slow.done()
        source.may_resume.set()
        assert (await slow).outputs == shares.outputs
        await idle(llm)

    run(program)


def test_iterator_may_wait_for_the_same_engine(llm: AsyncLLM) -> None:
    async def answer(prompt: list[int]) -> AsyncIterator[list[int]]:
        async for output in llm.generate(prompt, params(20, "DELTA")):
            yield output.outputs[0].token_ids

    async def program() -> None:
        first = (await last(llm.generate(IDS, params(20)))).outputs[0].token_ids
        wanted = await last(llm.generate(first, params()))
        got = await last(llm.generate(answer(IDS), params()))
        assert got.outputs == wanted.outputs

    run(program)


# ---- errors ------------------------------------------------------------------------------------

TOO_LONG = [1] * MAX_POSITION
WRONG: list[tuple[list[Any], str]] = [
    ([], "the prompt is empty"),
    (["", [], {"prompt_token_ids": []}], "the prompt is empty"),
    ([5], "a part of an open prompt must be a text, .* got int"),
    ([FOX, None], "a part of an open prompt must be a text, .* got NoneType"),
    ([FOX, {"text": "Hi"}], "a part of an open prompt must be a text, .* got dict"),
    ([FOX, [{"role": "user", "content": "Hi"}]], "open prompt must be a text, .* got list"),
    ([FOX, [True]], "integers from 0 on, got True"),
    ([FOX, {"prompt_token_ids": "17"}], "list of integers"),
    (["\ud800 "], "Unicode"),
    ([[10**6]], "vocabulary"),
    ([FOX, [10**6]], "prompt token id 1000000 is not in the vocabulary"),
    ([TOO_LONG], "the prompt has 128 tokens; .* max_model_len"),
    ([[1], TOO_LONG], "max_model_len"),
    ([FOX, {"prompt": "Hi", "cache_salt": "late"}], "cache_salt must come with the first part"),
]


@pytest.mark.parametrize("waits", [False, True], ids=["immediate", "later"])
def test_invalid_pieces_do_not_affect_other_requests(llm: AsyncLLM, waits: bool) -> None:
    """Later: the valid pieces have been sent before."""

    async def program() -> None:
        other = llm.generate(each([FOX]), params(40), "other")
        await anext(other)
        for pieces, message in WRONG:
            source = Source(pieces[:-1], lambda pieces=pieces: pieces[-1:])
            task = asyncio.create_task(
                last(llm.generate(source if waits and pieces else each(pieces), params()))
            )
            if waits and pieces:
                await source.waits.wait()
                source.may_resume.set()
            with pytest.raises(RequestError, match=message):
                await task
            assert source.has_ended.is_set() == (waits and bool(pieces))
        assert len([output async for output in other][-1].outputs[0].token_ids) == 40
        with pytest.raises(RequestError, match="max_model_len - 1 = 127"):
            await last(llm.generate(each([[1]] * MAX_POSITION), params()))
        await idle(llm)

    run(program)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 2}, "a prompt sent in pieces has one output"),
        ({"n": 2, "use_beam_search": True}, "a prompt sent in pieces has one output"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not possible for a prompt sent in pieces"),
    ],
)
def test_unsupported_parameters_are_rejected_before_reading(
    llm: AsyncLLM, more: dict[str, Any], message: str
) -> None:
    async def program() -> None:
        source = Source([FOX])
        with pytest.raises(RequestError, match=message):
            await last(llm.generate(source, SamplingParams(**more)))
        assert not source.has_ended.is_set() and not source.waits.is_set()

    run(program)


@pytest.mark.parametrize("pieces", [[], ["unfinished"], [FOX, " jumps"]])
@pytest.mark.parametrize(
    "error", [ValueError("no more"), EngineDead("of another"), asyncio.CancelledError("theirs")]
)
def test_exceptions_of_the_iterator_reach_the_caller(
    llm: AsyncLLM, pieces: list[str], error: BaseException
) -> None:
    async def program() -> None:
        source = Source(pieces, fail(error))
        task = asyncio.create_task(last(llm.generate(source, params())))
        await source.waits.wait()
        source.may_resume.set()
        await asyncio.wait([task])
        if isinstance(error, asyncio.CancelledError):
            assert task.cancelled()
        else:
            assert task.exception() is error
        await idle(llm)

    run(program)


def test_model_without_tokenizer_takes_token_id_pieces() -> None:
    async def program() -> None:
        async with await AsyncLLM.create(str(checkpoint("llama")), **SETTINGS) as engine:
            wanted = await last(engine.generate(IDS, params()))
            got = await last(engine.generate(each([IDS[:9], IDS[9:]]), params()))
            assert (got.outputs, got.prompt) == (wanted.outputs, None)
            with pytest.raises(RequestError, match="no tokenizer"):
                await last(engine.generate(each([IDS, "text"]), params()))

    run(program)


# ---- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[], ["unfinished"], [FOX, " jumps"]])
def test_cancelling_the_caller_cancels_the_iterator(llm: AsyncLLM, pieces: list[str]) -> None:
    async def program() -> None:
        source = Source(pieces)
        task = asyncio.create_task(last(llm.generate(source, params())))
        await source.waits.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert source.was_cancelled and source.has_ended.is_set()
        await idle(llm)

    run(program)


def test_abort_ends_an_open_prompt(llm: AsyncLLM) -> None:
    async def program() -> None:
        source = Source([FOX, " jumps"])
        task = asyncio.create_task(last(llm.generate(source, params(), "mine")))
        await source.waits.wait()
        await llm.abort("mine")
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == []
        assert output.prompt == f"{FOX} jumps"
        assert source.was_cancelled
        await idle(llm)

    run(program)


def test_timeout_ends_an_open_prompt(llm: AsyncLLM) -> None:
    async def program() -> None:
        source = Source([FOX])
        output = await last(llm.generate(source, params(), timeout_s=0.01))
        assert output.outputs[0].finish_reason == "timeout"
        assert source.was_cancelled
        await idle(llm)

    run(program)


def test_shutdown_ends_open_prompts() -> None:
    async def program() -> None:
        engine = await AsyncLLM.create(str(text_checkpoint()), **SETTINGS)
        sources = [Source(pieces) for pieces in ([FOX], [])]
        tasks = [asyncio.create_task(last(engine.generate(s, params()))) for s in sources]
        for source in sources:
            await source.waits.wait()
        engine.shutdown()
        with pytest.raises(EngineDead, match="was shut down"):
            await tasks[0]
        assert sources[0].was_cancelled
        sources[1].may_resume.set()  # it has sent nothing to the engine yet
        with pytest.raises(RequestError, match="the prompt is empty"):
            await tasks[1]

    run(program)

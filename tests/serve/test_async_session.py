"""Sessions of `AsyncLLM` work as in `LLM`: early exits, concurrent turns, and retained tokens.

Covers `serve/python/session_tokens.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from quire import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from quire.base.errors import RequestError
from quire.serve.python.async_session import AsyncSession
from tests.support.models.reference_checkpoints import checkpoint

SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "kv_cache_memory_bytes": 8 << 20,
    "disable_log_stats": True,
}
START = "Once upon a time there was a little fox."


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("demo", **SETTINGS)
    yield engine
    engine.shutdown()


def run(engine: AsyncLLM, program: Callable[[], Awaitable[None]]) -> None:
    """Run a program, after which no request is retained."""

    async def limited() -> None:
        await asyncio.wait_for(program(), 60)
        assert await (await engine._connected()).held() == [], "a closed session retains a request"

    asyncio.run(limited())


def params(num: int = 12, seed: int = 1, kind: str = "CUMULATIVE") -> SamplingParams:
    output_kind = RequestOutputKind[kind]
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=num, ignore_eos=True, output_kind=output_kind
    )


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def held(engine: AsyncLLM) -> list[int]:
    """Return the number of retained tokens of each request."""
    return [one.num_tokens for one in await (await engine._connected()).held()]


def test_async_session_matches_the_session_of_llm(llm: AsyncLLM) -> None:
    chat = [{"role": "user", "content": "Tell me a story about a fox."}]
    more = [{"role": "user", "content": "And a bear?"}]
    with LLM("demo", **SETTINGS) as other, other.session() as story, other.session() as talk:
        story.append(START).generate(params())
        story.append(" The bear").generate(params(seed=2))
        branch = story.fork(20).rewind(2).append([40, 41])
        branch.generate(params(seed=3))
        talk.append(chat).generate(params())
        talk.append(more).generate(params(seed=2))
        expected = story.token_ids, branch.token_ids, talk.token_ids
        branch.close()

    async def program() -> None:
        async with llm.session() as story, llm.session() as talk:
            await last((await story.append(START)).generate(params()))
            before = len(story.token_ids)
            found = await last((await story.append(" The bear")).generate(params(seed=2)))
            assert found.num_cached_tokens == before - 1, "all but the last token are cached"
            async with story.fork(20).rewind(2) as branch:
                found = await last((await branch.append([40, 41])).generate(params(seed=3)))
                assert found.num_cached_tokens == 18
                await last((await talk.append(chat)).generate(params()))
                await last((await talk.append(more)).generate(params(seed=2)))
                assert (story.token_ids, branch.token_ids, talk.token_ids) == expected
                assert sorted(await held(llm)) == sorted(map(len, expected))
                await story.close()  # the sessions that share its blocks continue
                assert len(await held(llm)) == 2

    run(llm, program)


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE", "FINAL_ONLY"])
def test_output_kinds_give_the_same_session_tokens(llm: AsyncLLM, kind: str) -> None:
    async def program() -> None:
        async with llm.session() as story, llm.session() as other:
            await last((await story.append(START)).generate(params(20, kind=kind)))
            await last((await other.append(START)).generate(params(20)))
            assert story.token_ids == other.token_ids

    run(llm, program)


def test_closing_a_turn_early_drops_its_answer(llm: AsyncLLM) -> None:
    async def program() -> None:
        async with llm.session() as story:
            await last((await story.append(START)).generate(params()))
            tokens = list(story.token_ids)
            async for output in story.generate(params(100, kind="DELTA")):
                assert not output.finished
                break
            assert story.token_ids == tokens
            found = await last(story.generate(params(seed=2)))
            assert found.prompt_token_ids == tokens
            assert found.num_cached_tokens == len(tokens) - 1, (
                "the earlier tokens were not retained"
            )

    run(llm, program)


def test_rewinding_during_a_turn_drops_its_answer(llm: AsyncLLM) -> None:
    async def program() -> None:
        async with llm.session() as story:
            await story.append(START)
            async for output in story.generate(params(30)):
                if not output.finished and len(story.token_ids) > 5:
                    story.rewind(len(story.token_ids) - 5)
            assert len(story.token_ids) == 5
            assert await held(llm) == []

    run(llm, program)


def test_forked_sessions_run_concurrently(llm: AsyncLLM) -> None:
    async def turn(session: AsyncSession, seed: int) -> None:
        await last((await session.append(" The")).generate(params(seed=seed)))

    async def program() -> None:
        async with llm.session() as story:
            await last((await story.append(START)).generate(params()))
            branches = [story.fork() for _ in range(3)]
            await asyncio.gather(*(turn(each, seed) for seed, each in enumerate(branches)))
            alone = story.fork()
            await turn(alone, 2)
            assert alone.token_ids == branches[2].token_ids != branches[1].token_ids
            for session in (*branches, alone):
                await session.close()

    run(llm, program)


def test_invalid_calls_are_rejected(llm: AsyncLLM) -> None:
    async def program() -> None:
        async with llm.session() as story:
            with pytest.raises(RequestError, match="no tokens yet"):
                await last(story.generate())
            await story.append([1] * 300)
            with pytest.raises(RequestError, match="max_model_len"):
                await last(story.generate(params()))
            with pytest.raises(RequestError, match="call fork"):
                await last(story.generate(SamplingParams(n=2)))

    run(llm, program)


@pytest.mark.slow
def test_session_stays_on_one_core() -> None:
    settings = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "disable_log_stats": True}
    engine = AsyncLLM(str(checkpoint("llama")), data_parallel_size=2, **settings)

    async def program() -> None:
        for number in range(3):
            async with engine.session() as session:
                await session.append([5 + number, 6, 7, 8, 9, 10])
                await last(session.generate(params(4)))
                async with session.fork() as other:
                    found = await last(other.generate(params(4)))
                    assert found.num_cached_tokens == 9

    try:
        run(engine, program)
    finally:
        engine.shutdown()

"""`AsyncLLM` in asyncio programs: the answers of `LLM`, concurrent requests, and all kinds of end.

Covers `serve/processes/managed_core.py`.
"""

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from quire.base.errors import (
    ConfigError,
    EngineBusy,
    EngineDead,
    ModelNotFound,
    OutOfMemory,
    RequestError,
)
from tests.support.models.reference_checkpoints import MAX_POSITION, checkpoint, text_checkpoint
from tests.support.processes.forks import run_forked
from tests.support.processes.servers import children_of, is_running, kill, wait_until

SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "max_num_seqs": 4,
    "max_model_len": MAX_POSITION,
    "disable_log_stats": True,
}
FOX = "The quick brown fox"
PROMPTS: list[Any] = [
    FOX,
    {"prompt": "Hello"},
    {"prompt_token_ids": [5, 17, 3, 60, 44, 8]},
    [9, 9, 4],
]
END_S = 30.0


def params(max_tokens: int = 12, kind: str = "CUMULATIVE", **more: Any) -> SamplingParams:
    more = {"temperature": 0.0, "ignore_eos": True} | more
    return SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind[kind], **more)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """One engine for all event loops of this module, one after the other."""
    engine = AsyncLLM(str(text_checkpoint()), **SETTINGS)
    yield engine
    pid = core_of(engine)
    engine.shutdown()
    assert not is_running(pid)


def core_of(engine: AsyncLLM) -> int:
    assert engine._cores._cores[0]._process is not None
    return engine._cores._cores[0]._process.process.pid


def cores_of_this() -> set[int]:
    """Return the ids of this process's cores."""
    return {pid for pid, line in children_of(os.getpid()).items() if "core_main" in line}


def run(program: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(program(), 60)

    asyncio.run(limited())


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of the cores' private directories; check that none of them is left."""
    text_checkpoint(), checkpoint("llama")  # shared by all tests, in another folder
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for a socket
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert not list(Path(folder).glob("quire-*"))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Return the final output."""
    found = [output async for output in outputs]
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    return found[-1]


async def idle(engine: AsyncLLM) -> None:
    """Wait until the core runs no request; the client must have none left either."""
    assert engine._link is not None
    assert engine._link.num_unfinished == 0
    async with asyncio.timeout(END_S):
        while not re.search(r"num_requests_running{.*} 0\.0", await engine._link.metrics()):
            await asyncio.sleep(0)


# ---- answers -----------------------------------------------------------------------------------


def test_asyncllm_matches_llm(llm: AsyncLLM) -> None:
    sampled = [params(temperature=0.9, seed=i, n=1 + i % 2, logprobs=2) for i in range(4)]
    with LLM(str(text_checkpoint()), **SETTINGS) as offline:
        expected = offline.generate(PROMPTS, sampled, use_tqdm=False)

    async def program() -> None:
        calls = [
            last(llm.generate(prompt, own, f"{i}"))
            for i, (prompt, own) in enumerate(zip(PROMPTS, sampled, strict=True))
        ]
        for got, wanted in zip(await asyncio.gather(*calls), expected, strict=True):
            assert got.outputs == wanted.outputs
            assert (got.prompt, got.prompt_token_ids) == (wanted.prompt, wanted.prompt_token_ids)
        await idle(llm)

    run(program)


def test_output_kinds_contain_the_same_tokens(llm: AsyncLLM) -> None:
    async def program() -> None:
        final = [o async for o in llm.generate(FOX, params(20, "FINAL_ONLY"))]
        [whole] = final[0].outputs
        assert len(final) == 1 and len(whole.token_ids) == 20
        cumulative = [o.outputs[0] async for o in llm.generate(FOX, params(20))]
        for before, after in zip(cumulative, cumulative[1:], strict=False):
            assert after.text.startswith(before.text)
            assert len(after.token_ids) > len(before.token_ids)
        assert (cumulative[-1].text, cumulative[-1].token_ids) == (whole.text, whole.token_ids)
        deltas = [o.outputs[0] async for o in llm.generate(FOX, params(20, "DELTA"))]
        assert "".join(part.text for part in deltas) == whole.text
        assert [token for part in deltas for token in part.token_ids] == whole.token_ids
        assert len(deltas) > 1

    run(program)


def test_concurrent_requests_match_single_ones(llm: AsyncLLM) -> None:
    async def ask(i: int) -> list[int]:
        output = await last(llm.generate([5 + i, 17, 3], params(8 + i % 5, seed=i)))
        return output.outputs[0].token_ids

    async def program() -> None:
        together = await asyncio.gather(*map(ask, range(30)))
        for i in (0, 7, 29):
            assert await ask(i) == together[i]
        await idle(llm)

    run(program)


def test_default_parameters_request_ids_and_health(llm: AsyncLLM) -> None:
    async def program() -> None:
        first = await last(llm.generate(FOX))
        second = await last(llm.generate(FOX))
        assert first.request_id != second.request_id
        assert len(first.outputs[0].token_ids) == 16  # vLLM's max_tokens
        tokenizer = await llm.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode(FOX, False)) == FOX
        assert await llm.reset_prefix_cache() is True
        await llm.check_health()
        assert llm.is_running and not llm.errored and not llm.is_stopped

    run(program)


def test_overlong_text_is_rejected(llm: AsyncLLM) -> None:
    async def program() -> None:
        with pytest.raises(RequestError, match="the prompt has .* tokens"):
            await last(llm.generate("word " * 4000, params()))

    run(program)


# ---- ends of requests --------------------------------------------------------------------------


def test_abort_returns_the_partial_output(llm: AsyncLLM) -> None:
    async def program() -> None:
        outputs = llm.generate(FOX, params(100), "mine")
        await anext(outputs)
        await llm.abort("mine")
        rest = [output async for output in outputs]
        assert rest[-1].finished
        assert rest[-1].outputs[0].finish_reason == "abort"
        assert 1 <= len(rest[-1].outputs[0].token_ids) < 100
        await llm.abort("mine")
        await llm.abort(["never there", "nor there"])
        await idle(llm)

    run(program)


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_closing_or_cancelling_a_reader_aborts_the_request(llm: AsyncLLM, how: str) -> None:
    async def program() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async with contextlib.aclosing(llm.generate(FOX, params(100))) as outputs:
                async for _ in outputs:
                    begun.set()
                    if how == "leave":
                        return

        task = asyncio.create_task(read())
        await begun.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (how == "cancel")
        await idle(llm)

    run(program)


def test_rejected_requests_do_not_affect_others(llm: AsyncLLM) -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([10**6], {}, "vocabulary"),
        ("", {}, "empty"),
        (5, {}, "must be a text"),
        (FOX, {"request_id": "other"}, "in use"),
        (FOX, {"lora_request": object()}, "adapters"),
        (FOX, {"data_parallel_rank": 1}, "one engine"),
        (FOX, {"timeout_s": -1.0}, "timeout_s"),
    ]

    async def program() -> None:
        other = llm.generate(FOX, params(40), "other")
        await anext(other)
        for prompt, more, message in wrong:
            with pytest.raises(RequestError, match=message):
                await last(llm.generate(prompt, params(), **more))
        final = [output async for output in other][-1]
        assert len(final.outputs[0].token_ids) == 40
        await idle(llm)

    run(program)


def test_request_past_its_deadline_ends_with_timeout(llm: AsyncLLM) -> None:
    async def program() -> None:
        output = await last(llm.generate(FOX, params(100), timeout_s=1e-6))
        [completion] = output.outputs
        assert completion.finish_reason == "timeout"
        assert "timeout_s=1e-06" in completion.error.message
        await idle(llm)

    run(program)


def test_full_queue_rejects_requests() -> None:
    async def program() -> None:
        settings = SETTINGS | {"max_num_seqs": 1, "max_num_queued_reqs": 1}
        async with await AsyncLLM.create(str(text_checkpoint()), **settings) as engine:
            calls = [last(engine.generate(FOX, params(60))) for _ in range(12)]
            got = await asyncio.gather(*calls, return_exceptions=True)
        refused = [error for error in got if isinstance(error, BaseException)]
        assert refused and all(isinstance(error, EngineBusy) for error in refused)
        assert len(refused) < 12

    run(program)


# ---- ends of engines ---------------------------------------------------------------------------


def test_event_loop_runs_while_the_model_loads() -> None:
    async def program() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        async with await AsyncLLM.create(str(text_checkpoint()), **SETTINGS) as engine:
            assert ticks > 20
            pid = core_of(engine)
            await last(engine.generate(FOX, params(3)))
        assert not is_running(pid)
        ticking.cancel()

    run(program)


def test_cancelled_start_leaves_no_core(homes: Path) -> None:
    async def program() -> None:
        before = cores_of_this()
        task = asyncio.create_task(AsyncLLM.create(str(text_checkpoint()), **SETTINGS))
        while not (new := cores_of_this() - before):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        wait_until(lambda: not any(map(is_running, new)), "the core has ended")

    run(program)


def test_vllm_constructors_create_an_engine() -> None:
    args = AsyncEngineArgs(str(text_checkpoint()), tensor_parallel_size=1, **SETTINGS)
    args.max_num_seqs = 2

    async def program() -> None:
        async with AsyncLLMEngine.from_engine_args(args) as engine:
            assert isinstance(engine, AsyncLLM)
            output = await last(
                engine.generate(prompt=FOX, sampling_params=params(3), request_id="a")
            )
            assert output.request_id == "a"

    run(program)
    with pytest.raises(ConfigError, match="stat_loggers"):
        AsyncLLM.from_engine_args(args, stat_loggers=[])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        args = AsyncEngineArgs("demo", tensor_parallel_size=2, distributed_executor_backend="uni")
        AsyncLLM.from_engine_args(args)


def test_startup_errors_are_raised_by_the_constructor(homes: Path) -> None:
    with pytest.raises(ConfigError, match="no setting 'max_modle_len'"):
        AsyncLLM("demo", max_modle_len=5)
    with pytest.raises(ModelNotFound):
        AsyncLLM("./nowhere")
    with pytest.raises(OutOfMemory, match="kv_cache_memory_bytes|KV"):  # found by the core
        AsyncLLM(str(checkpoint("llama")), **SETTINGS, kv_cache_memory_bytes=1)


def test_dead_core_fails_open_and_new_requests(homes: Path) -> None:
    async def program() -> None:
        engine = await AsyncLLM.create(str(text_checkpoint()), **SETTINGS)
        readers = [engine.generate(FOX, params(100)) for _ in range(3)]
        for reader in readers:
            await anext(reader)
        kill(core_of(engine), signal.SIGSTOP)  # so that no request finishes first
        kill(core_of(engine))
        for reader in readers:
            with pytest.raises(EngineDead, match="has ended"):
                await last(reader)
        wait_until(lambda: engine.errored, "the process is gone")
        assert engine.is_stopped
        assert "signal 9" in str(engine.dead_error)
        with pytest.raises(EngineDead, match="signal 9"):
            await engine.check_health()
        with pytest.raises(EngineDead, match="signal 9"):
            await last(engine.generate(FOX, params()))
        with pytest.raises(EngineDead, match="signal 9"):
            await engine.reset_prefix_cache()
        engine.shutdown()

    run(program)


@pytest.mark.parametrize("how", ["shutdown", "block"])
def test_shutdown_fails_open_requests(homes: Path, how: str) -> None:
    async def program() -> None:
        engine = await AsyncLLM.create(str(text_checkpoint()), **SETTINGS)
        reader = engine.generate(FOX, params(100))
        waiting = [engine.generate(FOX, params(100)) for _ in range(6)]  # more requests than rows
        await anext(reader)
        readers = [asyncio.create_task(last(outputs)) for outputs in waiting]
        await asyncio.sleep(0)
        if how == "shutdown":
            engine.shutdown()
        else:
            async with engine:
                pass
        with pytest.raises(EngineDead, match="was shut down"):
            await last(reader)
        got = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(error, EngineDead) for error in got)
        engine.shutdown()
        assert not engine.errored and engine.is_stopped
        with pytest.raises(EngineDead, match="was shut down"):
            await last(engine.generate(FOX, params()))

    run(program)


def test_engine_serves_one_event_loop_at_a_time(llm: AsyncLLM) -> None:
    async def ask() -> list[int]:
        return (await last(llm.generate(FOX, params(5)))).outputs[0].token_ids

    first = asyncio.run(ask())
    assert asyncio.run(ask()) == first

    async def from_another_thread() -> None:
        await ask()
        with pytest.raises(ConfigError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, ask())

    run(from_another_thread)


def test_unreferenced_engine_ends_its_core() -> None:
    engine = AsyncLLM(str(text_checkpoint()), **SETTINGS)
    pid = core_of(engine)
    del engine
    gc.collect()
    wait_until(lambda: not is_running(pid), "the core has ended")


PROGRAM = """
    import asyncio, os, sys, threading
    from quire import AsyncLLM, SamplingParams

    made = []
    def make():  # in a thread that ends before the engine is used
        made.append(AsyncLLM({model!r}, max_model_len=96, disable_log_stats=True))
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    [engine] = made

    async def program():
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        async for output in engine.generate("Hi", params):
            pass
        core = engine._cores._cores[0]._process.process
        print(len(output.outputs[0].token_ids), core.pid, flush=True)
        {end}

    asyncio.run(program())
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("pass", 0, marks=pytest.mark.slow),
        pytest.param("sys.exit(7)", 7, marks=pytest.mark.slow),
        pytest.param("os._exit(7)", 7, marks=pytest.mark.slow),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_no_core_outlives_its_program(end: str, status: int) -> None:
    """The engine is created on a thread, whose end must not end the core."""
    program = textwrap.dedent(PROGRAM).format(model=str(text_checkpoint()), end=end)
    command = [sys.executable, "-c", program]
    if end in ("pass", "sys.exit(7)"):  # a fork does not shut the interpreter down
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    else:
        done = run_forked(command)
    assert done.returncode == status, done.stderr
    num_tokens, pid = map(int, done.stdout.split())
    assert num_tokens == 4
    wait_until(lambda: not is_running(pid), "the core has ended", 5)

"""Templates that never end or exhaust memory fail with an error, and other jobs continue.

The processes and their limits are real; nothing here depends on speed. All jobs share the pool.

Covers `render/jobs/job_pool.py`.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.base.errors import EngineBusy, RequestError
from quire.render.jobs import job_pool
from quire.render.jobs.job_pool import JobProcess
from quire.render.templates.chat_template import ChatOptions
from quire.render.templates.template_job import TemplateJob
from quire.render.templates.template_pool import TEMPLATES, TemplatePool
from quire.render.templates.template_worker import InThisProcess, unpack
from tests.support.cases import slow_but
from tests.support.processes.servers import children_of

USER = {"role": "user", "content": "Hello <s> \ud800 🙂"}
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH_MEMORY = (
    "{{ 'a' * 10**9 }}",
    "{% set n = 10**9 %}{{ 'a' * n }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ [0] * 10**9 }}",
    "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    "{% set x = namespace(l=[1]) %}{% for i in range(60) %}{% set x.l = x.l + x.l %}{% endfor %}",
    "{{ range(100000) | join('a' * 100000) }}",
)
REFUSED = {
    "{{ range(10**9) }}": "Range too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recurses without end",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{% for %}": "cannot be compiled",
    "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}": "more than 16777216 characters",
}


def job(source: str, content: Any = None, **more: Any) -> TemplateJob:
    messages = [USER if content is None else {"role": "user", "content": content}]
    return TemplateJob(source, {"bos_token": "<s>"}, messages, ChatOptions(), **more)


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    yield TemplatePool()


def test_pool_gives_the_same_text_as_an_in_process_render(pool: TemplatePool) -> None:
    options = ChatOptions(
        add_generation_prompt=False,
        tools=[{"type": "function", "function": {"name": "f", "x": [10**30, 1.5, None, True]}}],
        documents=[{"title": "t"}],
        template_kwargs={"deep": {"a": [1, {"b": "c"}]}},
    )
    source = (
        PLAIN + "{{ tools }}{{ documents }}{{ deep }}{{ bos_token }}{{ add_generation_prompt }}"
    )
    rendering = TemplateJob(source, {"bos_token": "<s>"}, [USER, USER], options)
    assert pool.render(rendering) == InThisProcess().render(rendering)
    assert asyncio.run(pool.render_async(rendering)) == InThisProcess().render(rendering)
    other = TemplateJob(source, {"bos_token": "<t>"}, [USER, USER], options)
    assert pool.render(other) == InThisProcess().render(other) != pool.render(rendering)
    assert pool.render(job(PLAIN, "x" * 3_000_000)) == "<|user|>" + "x" * 3_000_000


def test_pool_rejects_malformed_messages_like_an_in_process_render(pool: TemplatePool) -> None:
    class Odd(dict[str, Any]):
        pass

    odd = TemplateJob(PLAIN, {}, [Odd(role="user", content="Hi")], ChatOptions())
    assert unpack(odd.pack()).messages == [{"role": "user", "content": "Hi"}]
    assert pool.render(odd) == "<|user|>Hi"
    for messages, rule, field in (
        ([], "non-empty list", None),
        (7, "non-empty list", None),
        ([{"content": "x"}], "needs a role", "messages[0]"),
        ([{"role": "user", "content": object()}], "holds a object", "messages[0]"),
    ):
        rendering = TemplateJob(PLAIN, {}, messages, ChatOptions())
        for runner in (pool, InThisProcess()):
            with pytest.raises(RequestError, match=rule) as raised:
                runner.render(rendering)
            assert raised.value.field == field


@pytest.mark.parametrize("source", slow_but(TOO_MUCH_MEMORY, *TOO_MUCH_MEMORY[::2]))
def test_memory_of_a_template_is_bounded(pool: TemplatePool, source: str) -> None:
    with pytest.raises(RequestError, match=r"memory|ended its process"):
        pool.render(job(source))
    assert pool.render(job(PLAIN, "Hi")) == "<|user|>Hi"


@pytest.mark.parametrize("source", list(REFUSED))
def test_errors_of_the_sandbox_are_reported(pool: TemplatePool, source: str) -> None:
    with pytest.raises(RequestError, match=REFUSED[source]):
        pool.render(job(source))


def test_cpu_time_is_bounded_and_other_jobs_continue() -> None:
    """Other conversations are rendered while the endless one still runs."""
    pool = TemplatePool(cpu_s=0.9)

    async def both() -> None:
        endless = asyncio.create_task(pool.render_async(job(FOR_EVER)))
        await asyncio.sleep(0)
        for _ in range(3):
            assert await pool.render_async(job(PLAIN, "Hi")) == "<|user|>Hi"
        assert not endless.done()
        with pytest.raises(RequestError, match=r"0\.9 s of processor time"):
            await endless
        assert await pool.render_async(job(PLAIN, "Hi")) == "<|user|>Hi"

    asyncio.run(both())


def test_foreign_templates_leave_a_process_to_other_templates() -> None:
    """Four endless foreign templates leave one of two processes free."""
    pool = TemplatePool(max_processes=2)

    async def crowd() -> None:
        endless = [
            asyncio.create_task(pool.render_async(job(FOR_EVER, is_foreign=True))) for _ in range(4)
        ]
        await asyncio.sleep(0)
        assert await pool.render_async(job(PLAIN, "Hi")) == "<|user|>Hi"
        assert not any(task.done() for task in endless)
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        assert await pool.render_async(job(PLAIN, "Hi", is_foreign=True)) == "<|user|>Hi"

    asyncio.run(crowd())


def test_result_of_a_cancelled_job_is_not_given_to_another() -> None:
    pool = TemplatePool(max_processes=1)

    async def go() -> None:
        for turns in range(6):
            task = asyncio.create_task(pool.render_async(job(PLAIN, "mine" * 100_000)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await pool.render_async(job(PLAIN, f"yours {turns}")) == f"<|user|>yours {turns}"

    asyncio.run(go())


def test_jobs_beyond_the_maximum_number_waiting_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_pool, "MAX_WAITING", 2)
    pool = TemplatePool(max_processes=1)

    async def go() -> None:
        tasks = [asyncio.create_task(pool.render_async(job(PLAIN, "Hi"))) for _ in range(4)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found[:3] == ["<|user|>Hi"] * 3  # one running and two waiting
        assert isinstance(found[3], EngineBusy)

    asyncio.run(go())


def test_process_killed_during_its_start_is_reported_as_busy() -> None:
    process = JobProcess(TEMPLATES)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(OSError):
        process.exchange(job(PLAIN).pack())
    end = process.why()
    assert end.is_busy and "does not start" in end.text


@pytest.mark.parametrize(
    ("sent", "is_busy", "message"),
    [
        (signal.SIGPROF, False, "5 s of processor time"),
        (signal.SIGSEGV, False, "nested too deep"),
        (signal.SIGTERM, False, "error in a library"),
        (signal.SIGKILL, True, "killed from outside"),
    ],
)
def test_error_explains_the_signal_that_ended_the_process(
    sent: signal.Signals, is_busy: bool, message: str
) -> None:
    process = JobProcess(TEMPLATES)
    process.exchange(job(PLAIN).pack())
    os.kill(process.pid, sent)
    with pytest.raises(OSError):
        process.exchange(job(PLAIN).pack())
    end = process.why()
    assert end.is_busy == is_busy and message in end.text


def test_abort_for_lack_of_memory_is_reported_as_the_memory_limit() -> None:
    """A library that cannot allocate memory writes this message and aborts."""
    process = JobProcess(TEMPLATES)
    process.exchange(job(PLAIN).pack())
    process._begin()
    os.write(process._last_words.fileno(), b"memory allocation of 4096 bytes failed")
    os.kill(process.pid, signal.SIGABRT)
    assert "more than 512 MiB of memory" in process.why().text
    process.kill()


def test_cancelled_job_does_not_kill_a_starting_process() -> None:
    """Otherwise impatient clients would kill every process before it is ready."""
    pool = TemplatePool(max_processes=1)
    pool.prepare()
    [process] = pool._jobs._idle
    os.kill(process.pid, signal.SIGSTOP)

    async def go() -> None:
        task = asyncio.create_task(pool.render_async(job(PLAIN, "mine")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pool._jobs._idle == [process]
        os.kill(process.pid, signal.SIGCONT)
        assert await pool.render_async(job(PLAIN, "yours")) == "<|user|>yours"
        assert pool._jobs._idle == [process]

    asyncio.run(go())


def test_death_of_an_idle_process_does_not_fail_the_next_job() -> None:
    """The kernel may kill an idle process when memory is short."""
    pool = TemplatePool(max_processes=1)

    def end_it() -> None:
        [process] = pool._jobs._idle
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert pool.render(job(PLAIN, "Hi")) == "<|user|>Hi"
    end_it()
    assert pool.render(job(PLAIN, "Hi")) == "<|user|>Hi"
    end_it()
    assert asyncio.run(pool.render_async(job(PLAIN, "Hi"))) == "<|user|>Hi"


def test_process_that_does_not_answer_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process uses no CPU time, so no limit ends it, and the job is not at fault."""
    pool = TemplatePool(max_processes=1)
    assert pool.render(job(PLAIN, "Hi")) == "<|user|>Hi"
    [process] = pool._jobs._idle
    monkeypatch.setattr(process, "_kind", replace(TEMPLATES, answer_s=0.1))

    async def go() -> None:
        os.kill(process.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            with pytest.raises(EngineBusy, match=r"too little processor time for 0\.1 s"):
                await pool.render_async(
                    job(PLAIN, "x" * 3_000_000)
                )  # more than the socket buffers hold
        monkeypatch.undo()
        assert await pool.render_async(job(PLAIN, "Hi")) == "<|user|>Hi"

    asyncio.run(go())


def test_kill_ends_and_reaps_the_process() -> None:
    process = JobProcess(TEMPLATES)
    pid = process.pid
    process.exchange(job(PLAIN, "Hi").pack())
    process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_process_ends_when_its_parent_has_died() -> None:
    """`kill -9` of a server closes its end of the socket; no process may survive it."""
    process = JobProcess(TEMPLATES)
    process.exchange(job(PLAIN, "Hi").pack())
    process._socket.close()
    assert process._process.wait(30) == 0
    process.kill()


def test_renders_reuse_one_process() -> None:
    pool = TemplatePool()
    pool.render(job(PLAIN, "Hi"))
    started = set(children_of(os.getpid()))
    for _ in range(20):
        pool.render(job(PLAIN, "Hi"))
    assert set(children_of(os.getpid())) <= started

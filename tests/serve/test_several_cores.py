"""data_parallel_size: `quire serve`, `LLM` and `AsyncLLM` with two cores.

Covers `serve/processes/children.py` and `serve/processes/core_processes.py`.
"""

import asyncio
import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import ConfigError, EngineDead, OutOfMemory, RequestError
from quire.engine.recording.files import segment_paths
from tests.support.processes.servers import (
    Server,
    Stream,
    children_of,
    is_running,
    kill,
    wait_until,
)

# float32: without the C++ core, sums depend on the number of threads, and two cores share them.
SETTINGS: dict[str, Any] = {"dtype": "float32", "disable_log_stats": True}
PROMPTS = [f"The number {i} is" for i in range(6)]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=12) for i in range(6)]
STORY = "Once upon a time there was a little fox who lived in a deep forest with its mother. "


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return the answers of one core."""
    with LLM("demo", **SETTINGS) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS, False)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    record = tmp_path_factory.mktemp("record")
    options = ["--api-server-count", "2", "--restart-engine", "--record", str(record)]
    server = Server("-dp", "2", "--dtype", "float32", *options)
    yield server
    assert server.stop() == 0
    assert not any(map(is_running, server.children))
    assert sorted(path.name for path in record.iterdir()) == ["core-0", "core-1"]
    assert all(segment_paths(path) for path in record.iterdir())


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def cores_of(server: Server) -> list[int]:
    """Return the process ids in the order of the cores' numbers."""
    found = {}
    for pid, command in children_of(server.process.pid).items():
        if "core_main" in command:
            found[int(re.search(r"--core (\d+)", command)[1])] = pid  # type: ignore[index]
    return [found[number] for number in sorted(found)]


def samples(server: Server, name: str) -> dict[str, float]:
    """Return the values of a metric by core."""
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        text = answer.read().decode()
    assert text.count(f"# TYPE {name} ") == 1
    found = re.findall(rf'^{name}{{.*engine="(\d)".*}} (\S+)$', text, re.MULTILINE)
    return {core: float(value) for core, value in found}


# ---- the server --------------------------------------------------------------------------------


def test_two_cores_share_requests_and_answer_like_one(server: Server, expected: list[str]) -> None:
    before = samples(server, "quire:prompt_tokens_total")
    for prompt, params, text in zip(PROMPTS, PARAMS, expected, strict=True):
        answer = client_of(server).completions.create(
            model="demo", prompt=prompt, temperature=0.8, seed=params.seed, max_tokens=12
        )
        assert answer.choices[0].text == text
    after = samples(server, "quire:prompt_tokens_total")
    assert all(after[core] > before[core] for core in ("0", "1"))
    assert set(samples(server, "process_resident_memory_bytes")) == {"0", "1"}


def test_conversation_stays_on_its_core(server: Server) -> None:
    client, text, hits = client_of(server), STORY * 2, []
    for turn in range(3):
        answer = client.completions.create(
            model="demo", prompt=text, temperature=0, max_tokens=20, n=1
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        hits.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        text += answer.choices[0].text + STORY
        with urllib.request.urlopen(f"{server.url}/v1/requests/{answer.id}") as stats:
            assert json.load(stats)["cached_tokens"] == hits[turn]
    assert 0 == hits[0] < hits[1] < hits[2]


def test_header_selects_the_core(server: Server) -> None:
    def ask(core: str) -> Any:
        return client_of(server).chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=2,
            extra_headers={"X-data-parallel-rank": core},
        )

    name = "quire:prompt_tokens_total"
    before = samples(server, name)
    for _ in range(4):
        ask("1")
    after = samples(server, name)
    assert after["0"] == before["0"] and after["1"] > before["1"]
    for wrong, message in (("2", "there are 2 cores, 0 to 1"), ("x", 'number of a core, got "x"')):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(wrong)


def test_prefix_is_pinned_on_both_cores(server: Server) -> None:
    def call(method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.url + path, data, headers, method=method)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    made = call("POST", "/v1/prefixes", {"prompt": STORY + "Pinned."})
    assert made["status"] == "ready"
    assert list(samples(server, "quire:pinned_prefixes").values()) == [1, 1]
    assert [each["id"] for each in call("GET", "/v1/prefixes")["data"]] == [made["id"]]
    assert call("DELETE", f"/v1/prefixes/{made['id']}")["deleted"]
    assert call("GET", "/v1/prefixes")["data"] == []


def test_disconnects_free_rows_on_both_cores(server: Server) -> None:
    streams = [Stream(server) for _ in range(4)]
    for stream in streams:
        stream.event()
    assert list(samples(server, "quire:num_requests_running").values()) == [2, 2]
    for stream in streams:
        stream.close()
    running = "quire:num_requests_running"
    wait_until(lambda: set(samples(server, running).values()) == {0}, "all rows are free")


def test_killed_core_restarts_while_the_other_serves(server: Server) -> None:
    streams = [Stream(server, 700) for _ in range(2)]
    for stream in streams:
        stream.event()
    gone, stays = cores_of(server)
    kill(gone)
    wait_until(
        lambda: set(samples(server, "quire:num_requests_running")) == {"1"}, "the core is gone"
    )
    assert server.get("/health") == 200
    for _ in range(2):
        answer = client_of(server).completions.create(model="demo", prompt="Hi", max_tokens=3)
        assert answer.choices[0].finish_reason in ("length", "stop")
    ends = [stream.rest() for stream in streams]
    failed = [events[-1]["error"]["code"] for events in ends if "error" in events[-1]]
    assert failed == ["engine_dead"]
    [whole] = [events[-1]["usage"] for events in ends if "usage" in events[-1]]
    assert whole["completion_tokens"] == 700
    wait_until(lambda: len(samples(server, "quire:num_requests_running")) == 2, "it is back")
    assert cores_of(server)[1] == stays and gone not in cores_of(server)
    for _ in range(4):
        client_of(server).completions.create(model="demo", prompt="Hi", max_tokens=3)
    assert samples(server, "quire:prompt_tokens_total")["0"] > 0


def test_without_restart_engine_a_dead_core_ends_the_server() -> None:
    server = Server("-dp", "2", "--kv-cache-memory-bytes", "50000000")
    try:
        kill(cores_of(server)[1])
        assert server.process.wait(20) == 1
        server.wait_for_line("core 1 ended unexpectedly")
        wait_until(lambda: not any(map(is_running, server.children)), "all have ended", 5)
    finally:
        server.process.kill()


# ---- in Python ---------------------------------------------------------------------------------


def test_llm_spreads_a_batch_and_answers_in_order(expected: list[str]) -> None:
    with LLM("demo", data_parallel_size=2, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, False)
        assert [output.outputs[0].text for output in outputs] == expected
        [several] = llm.generate(["Hi"], SamplingParams(n=3, max_tokens=5, seed=3), False)
        assert len(several.outputs) == 3
        pieces = llm.stream("Once upon", SamplingParams(temperature=0.0, max_tokens=8))
        first = next(pieces)
        inner = llm.generate(["Hi"], SamplingParams(temperature=0.0, max_tokens=3), False)
        text = first.outputs[0].text + "".join(piece.outputs[0].text for piece in pieces)
        [whole] = llm.generate(["Once upon"], SamplingParams(temperature=0.0, max_tokens=8), False)
        assert whole.outputs[0].text == text and inner[0].finished
        next(left := llm.stream("Once upon", SamplingParams(max_tokens=500, ignore_eos=True)))
        left.close()  # type: ignore[attr-defined]
        pinned = llm.pin_prefix(STORY)
        assert pinned.is_ready and llm.pinned_prefixes()[0].id == pinned.id
        assert llm.unpin_prefix(pinned.id) and not llm.unpin_prefix(pinned.id)
        llm.reset_prefix_cache()
        with pytest.raises(RequestError, match="vocabulary"):
            llm.generate([{"prompt_token_ids": [10**8]}], use_tqdm=False)
        with pytest.raises(ConfigError, match="data_parallel_size=2"):
            llm.engine  # noqa: B018
        children = children_of_this()
        kill(children[1])
        with pytest.raises(EngineDead, match="ended"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True), False)
        assert llm.generate(["Hi"], SamplingParams(max_tokens=2), False)[0].finished
    wait_until(lambda: not any(map(is_running, children)), "they have ended")


def test_llm_raises_the_startup_error_of_a_core() -> None:
    with pytest.raises(OutOfMemory, match="KV pool"):
        LLM("demo", data_parallel_size=2, kv_cache_memory_bytes=1000)


def test_async_llm_continues_with_the_surviving_core(expected: list[str]) -> None:
    async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams, core: Any = None) -> Any:
        outputs = llm.generate(prompt, params, data_parallel_rank=core)
        async with contextlib.aclosing(outputs):
            return [output async for output in outputs][-1]

    async def pieces() -> Any:
        for piece in ("Once upon", " a time"):
            yield piece

    async def run() -> None:
        async with await AsyncLLM.create("demo", data_parallel_size=2, **SETTINGS) as llm:
            pairs = zip(PROMPTS, PARAMS, strict=True)
            outputs = await asyncio.gather(*(last(llm, *pair) for pair in pairs))
            assert [output.outputs[0].text for output in outputs] == expected
            greedy = SamplingParams(temperature=0.0, max_tokens=5)
            whole = await last(llm, "Once upon a time", greedy, 0)
            opened = await last(llm, pieces(), greedy, 1)
            assert opened.outputs[0].text == whole.outputs[0].text
            with pytest.raises(RequestError, match="data_parallel_rank=2: there are 2 cores"):
                await last(llm, "Hi", greedy, 2)
            await llm.check_health()
            children = children_of_this()
            kill(children[0])
            wait_until(lambda: not is_running(children[0]), "it has ended")
            await asyncio.sleep(0.1)
            with pytest.raises(EngineDead, match="core 0 of the engine has ended"):
                await llm.check_health()
            assert llm.is_running and (await last(llm, "Hi", greedy)).finished
            with pytest.raises(EngineDead):
                await last(llm, "Hi", greedy, 0)

    asyncio.run(run())


def children_of_this() -> list[int]:
    """Return the process ids of this program's cores, in the order of their numbers."""
    me = int(Path("/proc/self").readlink().name)
    found = [pair for pair in children_of(me).items() if "core_main" in pair[1]]
    return [pid for pid, _ in sorted(found, key=lambda pair: pair[1].partition("--core ")[2])]

"""Pinned prefixes save computation and change no output: `LLM`, `AsyncLLM`, `--pin-prefix` and
`quire serve` with two API processes.

Covers `engine/start/prefix_file.py`.
"""

import asyncio
import http.client
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.ops.host.native import core
from tests.support.cases import in_turn
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes
from tests.support.processes.forks import run_forked
from tests.support.processes.servers import Server, wait_until

[PREFIX] = random_tokens(22, seed=4)  # five blocks of 4, and 2 tokens
RESTS = random_tokens(1, 7, 19, seed=5)
PROMPTS = [[*PREFIX, *rest] for rest in RESTS]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "n": {"temperature": 0.9, "seed": 8, "n": 3},
}
SYSTEM = {"role": "system", "content": "You are a fox who lives in the forest. Answer in rhymes."}
QUESTIONS = ["Hi", "Tell me a story about a boat."]
TEXT = "Once upon a time, there was a little fox named"
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


def open_llm(architecture: str, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4}
    return LLM(str(checkpoint(architecture)), disable_log_stats=True, **(defaults | settings))


def demo(**settings: Any) -> LLM:
    return LLM("demo", disable_log_stats=True, kv_cache_memory_bytes=8 << 20, **settings)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "ignore_eos": True, "logprobs": 2} | options))


def found(outputs: list[RequestOutput]) -> list[list[tuple[int, dict[int, float]]]]:
    """Return the tokens and their log-probabilities of all continuations."""
    return [
        [
            (token, {t: logprob.logprob for t, logprob in entry.items()})
            for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)
        ]
        for output in outputs
        for one in output.outputs
    ]


def cached(outputs: list[RequestOutput]) -> list[int | None]:
    return [output.num_cached_tokens for output in outputs]


def generate(llm: LLM, options: dict[str, Any], salt: str = "") -> list[RequestOutput]:
    """Run the prompts one after the other."""
    prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in PROMPTS]
    return [llm.generate([prompt], params(**options), False)[0] for prompt in prompts]


# ---- LLM ---------------------------------------------------------------------------------------


# For each architecture: whether the quick cases use prefix caching.
QUICK: dict[str, tuple[bool, ...]] = {
    "llama": (),
    "mistral": (False,),
    "qwen2": (),
    "qwen3": (),
    "opt": (True,),
    "gpt2": (),
}


@needs_core
@pytest.mark.parametrize(
    ("architecture", "caching"),
    [
        pytest.param(name, caching, marks=[] if caching in quick else pytest.mark.slow)
        for name, quick in QUICK.items()
        for caching in (True, False)
    ],
)
def test_pinned_prefixes_leave_outputs_bit_identical(architecture: str, caching: bool) -> None:
    """Greedy, seeded and several samples; this mistral has a window of 9 tokens."""
    with open_llm(architecture, enable_prefix_caching=False) as llm:
        wanted = {name: found(generate(llm, options)) for name, options in OPTIONS.items()}
    with open_llm(architecture, enable_prefix_caching=caching) as llm:
        made = llm.pin_prefix({"prompt_token_ids": PREFIX}, cache_salt="mine")
        assert (made.num_tokens, made.is_ready, made.num_hits) == (22, True, 0)
        assert cached(generate(llm, OPTIONS["greedy"])) == ([0, 20, 20] if caching else [0, 0, 0])
        for name, options in OPTIONS.items():
            llm.reset_prefix_cache()
            assert not llm.pinned_prefixes()[0].is_ready
            generate(llm, OPTIONS["greedy"], "another")  # meanwhile the prefix is recomputed
            outputs = generate(llm, options, "mine")
            assert found(outputs) == wanted[name], name
            assert cached(outputs) == [22, 22, 22]
        [prefix] = llm.pinned_prefixes()
        assert (prefix.id, prefix.num_hits) == (made.id, 9)
        assert llm.unpin_prefix(made.id)
        assert not llm.unpin_prefix(made.id)
        assert all(p.num_used == 0 for p in llm.engine.client.core.scheduler.memory.kv.pools)


@needs_core
@pytest.mark.parametrize(
    ("architecture", "mode"), in_turn(("qwen3", "mistral"), ("recompute", "swap"))
)
def test_pinned_prefixes_leave_outputs_identical_under_preemption(
    architecture: str, mode: str
) -> None:
    """All prompts run together in a pool so small that they preempt each other."""
    prompts = [[*PREFIX, i, *rest] for i in range(4) for rest in RESTS]
    options = params(temperature=0.8, seed=3, max_tokens=20)
    with open_llm(architecture, enable_prefix_caching=False) as llm:
        wanted = found(llm.generate(prompts, options, False))
    pool = pool_bytes(checkpoint(architecture), 20, 4, 4)
    few = {"kv_cache_memory_bytes": pool, "preemption_mode": mode, "max_num_batched_tokens": 16}
    with open_llm(architecture, **few) as llm:
        llm.pin_prefix(PREFIX)
        outputs = llm.generate(prompts, options, False)
        assert found(outputs) == wanted
        assert all((output.num_cached_tokens or 0) >= 22 for output in outputs)
        if architecture == "qwen3":  # mistral's window frees blocks, so none is
            assert any(o.metrics is not None and o.metrics.num_preemptions for o in outputs)


def test_prompt_logprobs_skip_pinned_prefixes() -> None:
    with open_llm("llama") as llm:
        [wanted] = llm.generate([PROMPTS[1]], params(prompt_logprobs=1), False)
        llm.pin_prefix(PREFIX)
        [output] = llm.generate([PROMPTS[1]], params(prompt_logprobs=1), False)
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None and wanted.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(PROMPTS[1])
        for mine, other in zip(output.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            assert mine is not None and other is not None and mine.keys() == other.keys()
        assert llm.pinned_prefixes()[0].num_hits == 0


def test_pinned_system_message_is_a_prefix_of_conversations() -> None:
    conversations = [[SYSTEM, {"role": "user", "content": text}] for text in QUESTIONS]
    options = SamplingParams(temperature=0.0, max_tokens=12)
    with demo(enable_prefix_caching=False) as llm:
        wanted = [output.outputs[0].text for output in llm.chat(conversations, options, False)]
        made = llm.pin_prefix([SYSTEM])
        outputs = llm.chat(conversations, options, False)
        assert [output.outputs[0].text for output in outputs] == wanted
        assert cached(outputs) == [made.num_tokens] * 2
        [alone] = llm.chat([conversations[0][1:]], options, False)
        assert alone.num_cached_tokens == 0


def test_invalid_prefixes_are_rejected_with_a_reason() -> None:
    pool = pool_bytes(checkpoint("llama"), 18, 4, 4)
    with open_llm("llama", kv_cache_memory_bytes=pool) as llm:
        for prompt, ttl_s, message in [
            (PREFIX * 2, 0.0, "11 of 18 KV blocks, and the limit is half"),
            (PREFIX * 3, 0.0, "max_model_len - 1 = 63"),
            ([97], 0.0, "token id 97 is not in the vocabulary"),
            ([], 0.0, "non-empty"),
            (PREFIX, -1.0, "ttl_s must be"),
        ]:
            with pytest.raises(RequestError, match=message):
                llm.pin_prefix(prompt, ttl_s)
        assert llm.pinned_prefixes() == []
        assert llm.pin_prefix(PREFIX, 100.0).expires_in_s == pytest.approx(100, abs=1)


def test_ttl_that_passes_immediately_is_rejected() -> None:
    with (
        open_llm("llama") as llm,
        pytest.raises(RequestError, match="its ttl_s has passed already"),
    ):
        llm.pin_prefix(PREFIX, 1e-9)


def test_expired_prefix_leaves_room_for_the_next() -> None:
    pool = pool_bytes(checkpoint("llama"), 18, 4, 4)
    with open_llm("llama", kv_cache_memory_bytes=pool) as llm:
        for _ in range(2):
            llm.pin_prefix(PREFIX, ttl_s=0.05)
            wait_until(lambda: llm.pinned_prefixes() == [], "the prefix expires")


def test_asyncllm_pins_and_unpins_prefixes() -> None:
    async def program() -> None:
        settings = {"dtype": "float32", "max_model_len": 64, "block_size": 4}
        engine = AsyncLLM(
            str(checkpoint("llama")), max_num_batched_tokens=1, disable_log_stats=True, **settings
        )
        async with engine as llm:
            wanted = [o async for o in llm.generate(PROMPTS[1], params(temperature=0.0))][-1]
            await llm.reset_prefix_cache()
            made = await llm.pin_prefix(PREFIX)
            got = [o async for o in llm.generate(PROMPTS[1], params(temperature=0.0))][-1]
            assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert (wanted.num_cached_tokens, got.num_cached_tokens) == (0, 22)
            assert [(p.id, p.num_hits) for p in await llm.pinned_prefixes()] == [(made.id, 1)]
            for is_computed in (False, True):
                await cancel_pin(llm, is_computed)
                assert [p.id for p in await llm.pinned_prefixes()] == [made.id]
            with pytest.raises(RequestError, match="ttl_s must be"):
                await llm.pin_prefix(PREFIX, ttl_s=-1)
            assert await llm.unpin_prefix(made.id)
            assert not await llm.unpin_prefix(made.id)

    asyncio.run(asyncio.wait_for(program(), 60))


async def cancel_pin(llm: AsyncLLM, is_computed: bool) -> None:
    """Cancel while the prefix is computed, or once it is ready but its task has not resumed."""
    task = asyncio.create_task(llm.pin_prefix(PREFIX[::-1] * 2))
    link = llm._link
    assert link is not None
    while not link.num_unfinished:
        await asyncio.sleep(0)
    while is_computed and link.num_unfinished:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ---- --pin-prefix ------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_text_file_pins_its_text_without_the_final_newline(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "prefix.txt"
    file.write_bytes((TEXT + ending).encode())
    with demo(pin_prefix=str(file)) as llm:
        [prefix] = llm.pinned_prefixes()
        assert prefix.is_ready and prefix.num_tokens == len(llm.get_tokenizer().encode(TEXT))
        [output] = llm.generate([TEXT + " Tim. He"], SamplingParams(max_tokens=2), False)
        assert output.num_cached_tokens == prefix.num_tokens


@pytest.mark.parametrize("name", ["prefix.json", "PREFIX.JSON"])
@pytest.mark.parametrize("is_list", [True, False])
def test_json_file_pins_one_or_several_prefixes(tmp_path: Path, is_list: bool, name: str) -> None:
    entries: list[dict[str, Any]] = [
        {"messages": [SYSTEM], "ttl_s": 1000},
        {"prompt": TEXT, "cache_salt": "mine"},
        {"prompt": list(range(5, 45))},
    ]
    file = tmp_path / name
    file.write_text(json.dumps(entries if is_list else entries[0]))
    with demo(pin_prefix=str(file)) as llm:
        prefixes = llm.pinned_prefixes()
        assert len(prefixes) == (3 if is_list else 1)
        assert prefixes[0].expires_in_s == pytest.approx(1000, abs=100)
        short = SamplingParams(max_tokens=2)
        [output] = llm.chat([SYSTEM, {"role": "user", "content": "Hi"}], short, False)
        assert output.num_cached_tokens == prefixes[0].num_tokens
        for i, prompt in enumerate(
            [
                {"prompt": TEXT + " Tim. He", "cache_salt": "mine"},
                {"prompt_token_ids": list(range(5, 46))},
            ],
            start=1,
        ):
            [output] = llm.generate([prompt], short, False)
            assert output.num_cached_tokens == (prefixes[i].num_tokens if is_list else 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, r"absent.txt' cannot be read \(No such file"),
        (".", None, r"cannot be read \(Is a directory\)"),
        ("a.txt", b"\xff\xfe", "can't decode byte 0xff.* Give a text in UTF-8"),
        ("a.txt", b"", "a.txt', prefix 0: the prompt is empty"),
        ("a.json", b"[", "a.json' is not a list of prefixes: Input data was truncated"),
        ("a.json", b"5", "Expected `object | array`, got `int`"),
        ("a.json", b"[]", "a.json' holds no prefix"),
        ("a.json", b'{"prompt": "a", "ttl": 5}', "unknown field `ttl`"),
        ("a.json", b'{"prompt": "a", "ttl_s": "5"}', r"got `str` - at `\$.ttl_s`"),
        ("a.json", b'[{"prompt": "a"}, {}]', "a.json', prefix 1: give either prompt"),
        ("a.json", b'{"prompt": "a", "messages": []}', "prefix 0: give either prompt"),
        ("a.json", b'{"messages": []}', "prefix 0: messages is empty"),
        ("a.json", b'{"messages": [{"role": "user"}]}', r"messages\[0\] needs a content"),
        ("a.json", b'{"prompt": "a", "tools": [{}]}', "tools and chat_template_kwargs apply to"),
        ("a.json", b'{"prompt": [99999]}', "token id 99999 is not in the vocabulary"),
        ("a.json", b'{"prompt": "a", "ttl_s": -1}', "ttl_s must be a number of seconds"),
        (
            "a.json",
            json.dumps({"prompt": [5] * 2000}).encode(),
            "125 of 170 KV blocks, and the limit is half",
        ),
        ("a.json", json.dumps({"prompt": [5] * 3000}).encode(), "max_model_len - 1 = 2047"),
    ],
)
def test_invalid_prefix_file_fails_startup(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        demo(pin_prefix=str(file))
    assert f"pin_prefix={str(file)!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ('{"prompt": "a", "ttl": 5}', "field `ttl`")]
)
def test_quire_serve_exits_with_the_error_of_the_file(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "prefix.json"
    if content is not None:
        file.write_text(content)
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "0"]
    done = run_forked([*command, "--pin-prefix", str(file)])
    assert done.returncode == 3
    assert f"pin_prefix={str(file)!r}" in done.stderr and message in done.stderr
    assert "Traceback" not in done.stderr and "ready:" not in done.stderr


# ---- the server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("prefix") / "system.json"
    file.write_text(json.dumps({"messages": [SYSTEM]}))
    settings = ["--max-num-batched-tokens", "16", "--kv-cache-memory-bytes", str(32 << 20)]
    server = Server("--api-server-count", "2", "--pin-prefix", str(file), *settings)
    yield server
    assert server.stop() == 0


def call(server: Server, method: str, path: str = "", body: object = None) -> tuple[int, Any]:
    """Use a new connection, so that several calls reach both API processes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    text = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    connection.request(method, "/v1/prefixes" + path, text, headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def names(server: Server) -> list[str]:
    return [prefix["id"] for prefix in call(server, "GET")[1]["data"]]


def test_api_processes_share_pinned_prefixes(server: Server) -> None:
    assert names(server) == ["prefix-of-file-0"]
    status, made = call(server, "POST", body={"prompt": TEXT, "ttl_s": 1000})
    assert (status, made["status"]) == (200, "ready")
    hits = server.metric("quire:pinned_prefix_hits_total")
    for _ in range(6):
        assert names(server) == ["prefix-of-file-0", made["id"]]
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with client:
            answer = client.completions.create(
                model="demo", prompt=TEXT + " Tim. He", max_tokens=2, temperature=0
            )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == made["num_tokens"]
    assert call(server, "GET", f"/{made['id']}")[1]["num_hits"] == 6
    assert server.metric("quire:pinned_prefix_hits_total") == hits + 6
    assert server.metric("quire:pinned_prefixes") == 2
    assert call(server, "DELETE", f"/{made['id']}") == (
        200,
        {"id": made["id"], "object": "prefix", "deleted": True},
    )
    assert [call(server, "DELETE", f"/{made['id']}")[0] for _ in range(4)] == [404] * 4
    assert server.metric("quire:pinned_prefixes") == 1


def test_prefix_of_the_file_is_hit(server: Server) -> None:
    [prefix] = call(server, "GET")[1]["data"]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="demo", messages=[SYSTEM, {"role": "user", "content": "Hi"}], max_tokens=2
        )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == prefix["num_tokens"]


def test_expired_prefix_is_removed(server: Server) -> None:
    assert call(server, "POST", body={"prompt": "The cat sat on", "ttl_s": 0.3})[0] == 200
    wait_until(lambda: server.metric("quire:pinned_prefixes") == 1, "the prefix is removed")
    assert names(server) == ["prefix-of-file-0"]


def test_disconnect_while_computing_removes_the_prefix(server: Server) -> None:
    """1,000 tokens in steps of 16; the last step may end before the disconnect is noticed."""
    for i in range(4):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({"prompt": [5 + i] * 1000})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/prefixes", body, headers)
        wait_until(lambda: server.metric("quire:pinned_prefixes") == 2, "the prefix is registered")
        connection.sock.close()
        connection.close()
        wait_until(lambda: server.metric("quire:pinned_prefixes") == 1, "the prefix is removed")
    assert names(server) == ["prefix-of-file-0"]
    assert server.metric("quire:num_requests_running") == 0

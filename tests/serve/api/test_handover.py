"""Disaggregated serving: one server computes a prompt, and another one generates the answer.

The tests send the requests of vLLM's routers, for completions and chat, whole and streamed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.start.build import build_engine
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MODEL
from tests.support.serve.fake_client import FakeClient

TEXT = "Once upon a time there was a little fox who lived in a forest with its mother. " * 3
# The params that vLLM's proxy and llm-d's sidecar send to the first server.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TestClient]]:
    directory = tmp_path_factory.mktemp("blocks")
    engines = [engine(directory, role) for role in ("kv_producer", "kv_consumer")]
    clients = []
    for built in engines:
        context = ApiContext(
            FakeClient(built), built.renderer, built.requests, (MODEL,), ServerConfig(), 0
        )
        clients.append(TestClient(create_app(context), raise_server_exceptions=False))
    with clients[0], clients[1]:
        yield clients
    for built in engines:
        built.client.close()


def engine(directory: Path, role: str) -> Any:
    return build_engine(
        config_from_flat(
            model=MODEL,
            dtype="float32",
            max_num_seqs=8,
            max_model_len=512,
            kv_cache_memory_bytes=16 << 20,
            kv_store=(f"dir:{directory}",),
            kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": role},
            disable_log_stats=True,
        )
    )


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", BODIES)
def test_second_server_continues_from_the_first_servers_blocks(
    pair: list[TestClient], path: str
) -> None:
    first, second = pair
    body = BODIES[path] | {"temperature": 0, "cache_salt": path}
    alone = first.post(path, json=body | {"max_tokens": 12}).json()
    assert "kv_transfer_params" not in alone
    transfer = {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
    handover = first.post(path, json=body | transfer).json()["kv_transfer_params"]
    assert handover["do_remote_prefill"] is True and handover["do_remote_decode"] is False
    assert handover["remote_num_blocks"] >= 4 and len(handover["remote_block_ids"]) == 1
    transfer = {"max_tokens": 12, "kv_transfer_params": handover | {"tp_size": 1, "unknown": [1]}}
    answer = second.post(path, json=body | transfer).json()
    assert text_of(answer) == text_of(alone)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    num_prompt = answer["usage"]["prompt_tokens"]
    assert handover["remote_num_blocks"] == num_prompt // 16
    assert cached == (num_prompt - 1) // 16 * 16, "the second server computes the last token"
    assert "kv_transfer_params" not in answer
    streamed = second.post(path, json=body | transfer | {"stream": True})
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("path", BODIES)
def test_stream_sends_transfer_params_with_the_finish_reason(
    pair: list[TestClient], path: str, more: Any
) -> None:
    """They equal those of a whole response."""
    body = BODIES[path] | {"temperature": 0, "cache_salt": f"stream {path}", "max_tokens": 4}
    transfer = {"kv_transfer_params": PREFILL}
    handover = pair[0].post(path, json=body | transfer).json()["kv_transfer_params"]
    streamed = pair[0].post(path, json=body | transfer | {"stream": True} | more).text
    lines = [line for line in streamed.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    with_params = [chunk for chunk in chunks if "kv_transfer_params" in chunk]
    assert [chunk["kv_transfer_params"] for chunk in with_params] == [handover]
    assert with_params[0]["choices"][0]["finish_reason"] == "length"
    plain = pair[0].post(path, json=body | {"stream": True}).text
    assert "kv_transfer_params" not in plain


def test_invalid_transfer_params_are_refused_empty_ones_accepted(pair: list[TestClient]) -> None:
    body = {"prompt": "Hi", "max_tokens": 1}
    for invalid in ({"do_remote_decode": "maybe"}, {str(i): 0 for i in range(65)}):
        answer = pair[0].post("/v1/completions", json=body | {"kv_transfer_params": invalid})
        assert answer.status_code == 400
        assert "kv_transfer_params" in answer.json()["error"]["message"]
    for empty in (None, {}, {"do_remote_prefill": False}):
        answer = pair[0].post("/v1/completions", json=body | {"kv_transfer_params": empty})
        assert answer.status_code == 200, answer.text


def test_several_prompts_get_no_transfer_params(pair: list[TestClient]) -> None:
    body = {"prompt": [TEXT, TEXT + "It was"], "max_tokens": 1, "kv_transfer_params": PREFILL}
    answer = pair[0].post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == 2 and "kv_transfer_params" not in answer

"""A trainer's requests over HTTP and in `AsyncLLM`, with the core in its own process.

Covers `serve/uploads.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from safetensors.torch import load_file, save

from quire import AsyncLLM, SamplingParams, SparseDelta
from quire.base.errors import RequestError
from quire.base.requests.outputs import WeightsSpan
from quire.models.load.patches import write_update
from quire.serve.errors import ApiError
from quire.serve.uploads import Uploads
from tests.support.models.reference_checkpoints import changed, changed_tensors, checkpoint
from tests.support.processes.servers import Server

PROMPT = list(range(3, 23))
NAME = "m"
KEYS = {"Authorization": "Bearer other"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    model = str(checkpoint("qwen3"))
    server = Server(
        model, "--served-model-name", NAME, "--max-model-len", "64", "--block-size", "4",
        "--api-key", "other", "admin", "--admin-api-key", "admin",
    )  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.headers["Authorization"] = "Bearer admin"
        yield client
    server.stop()


def tokens(http: httpx.Client) -> tuple[list[int], int]:
    body: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


def message(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    text = answer.json()["error"]["message"]
    assert isinstance(text, str)
    return text


def test_path_or_chunks_replace_the_weights(http: httpx.Client) -> None:
    original = str(checkpoint("qwen3"))
    before, _ = tokens(http)
    assert tokens(http) == (before, 16)
    order = {"update_info": {"path": str(changed("qwen3", 1))}, "weights_version": "one"}
    answer = http.post("/update_weights", json=order).json()
    assert answer == {"message": "Weights updated", "weights_version": "one"}
    one, cached = tokens(http)
    fields = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    [choice] = http.post("/v1/completions", json=fields).json()["choices"]
    assert choice["weights_versions"] == [{"first_token": 0, "version": "one"}]
    lines = http.post("/v1/completions", json=fields | {"stream": True}).text.split("\n\n")
    *rest, last = [line for line in lines if '"choices"' in line]
    assert '"weights_versions":[{"first_token":0,"version":"one"}]' in last
    assert not any("weights_versions" in line for line in rest)
    assert one != before and cached == 0

    http.post("/update_weights", json={"path": original}).raise_for_status()
    assert tokens(http) == (before, 0)
    body = {"init_info": {"backend": "http"}}
    http.post("/init_weight_transfer_engine", json=body).raise_for_status()
    start = {"is_checkpoint_format": True}
    http.post("/start_weight_update", json=start).raise_for_status()
    tensors = list(changed_tensors("qwen3", 1).items())
    for num, part in ((1, tensors[:9]), (2, tensors[9:])):
        answer = http.post("/update_weights/chunk", content=save(dict(part))).json()
        assert answer == {"chunks": num}
    http.post("/finish_weight_update", json={"weights_version": "two"}).raise_for_status()
    assert tokens(http) == (one, 0)

    # An incomplete set leaves the weights unchanged, and is dropped.
    http.post("/start_weight_update").raise_for_status()
    http.post("/update_weights/chunk", content=save(dict(tensors[:9]))).raise_for_status()
    assert "the old weights stay: the weight files lack" in message(
        http.post("/finish_weight_update")
    )
    assert "no update has begun" in message(http.post("/finish_weight_update"))
    assert tokens(http)[0] == one
    http.post("/update_weights", json={"path": original}).raise_for_status()


def test_chunks_replace_a_part_of_the_weights(http: httpx.Client, tmp_path: Path) -> None:
    """The last chunk is a delta. The result equals that of a full update."""
    new, path = changed_tensors("qwen3", 1), tmp_path / "delta.safetensors"
    http.post("/update_weights", json={"path": str(changed("qwen3", 1))}).raise_for_status()
    wanted = tokens(http)[0]
    http.post("/update_weights", json={"path": str(checkpoint("qwen3"))}).raise_for_status()
    old = load_file(checkpoint("qwen3") / "model.safetensors")
    *names, last = sorted(new)
    write_update({last: SparseDelta.between(old[last], new[last])}, path)
    http.post("/start_weight_update").raise_for_status()
    for content in (save({name: new[name] for name in names}), path.read_bytes()):
        http.post("/update_weights/chunk", content=content).raise_for_status()
    body = {"partial": True, "weights_version": "sum"}
    answer = http.post("/finish_weight_update", json=body)
    assert answer.json() == {"message": "Weights updated", "weights_version": "sum"}
    assert tokens(http) == (wanted, 0)
    order = {"path": str(path.parent), "partial": True}
    http.post("/update_weights", json=order).raise_for_status()  # the same result
    assert tokens(http)[0] == wanted
    http.post("/update_weights", json={"path": str(checkpoint("qwen3"))}).raise_for_status()


def test_chunk_that_arrives_after_its_update_is_rejected() -> None:
    class Request:
        async def stream(self) -> AsyncIterator[bytes]:
            yield b"first"
            uploads.begin()
            yield b"last"

    uploads = Uploads()
    uploads.begin()
    with pytest.raises(ApiError, match="ended before this chunk had arrived"):
        asyncio.run(uploads.add(Request()))  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="no chunk has arrived"):
        uploads.take()


def test_pause_and_resume_change_no_answer(http: httpx.Client) -> None:
    before, _ = tokens(http)
    for mode in ("abort", "wait", "keep"):
        assert http.post("/pause", params={"mode": mode}).json() == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert http.post("/resume").json() == {"status": "resumed"}
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert tokens(http)[0] == before


def test_sleep_and_wake_up_change_no_answer(http: httpx.Client) -> None:
    before, _ = tokens(http)
    for level in (1, 2):
        answer = http.post("/sleep", params={"level": level})
        assert answer.json() == {"status": "sleeping"}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert "wake it up instead" in message(http.post("/resume"))
        http.post("/wake_up", params={"tags": "weights"}).raise_for_status()
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        tags = {"tags": ["weights", "kv_cache"]}
        assert http.post("/wake_up", params=tags).json() == {"status": "awake"}
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert tokens(http) == (before, 0)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/update_weights", {}, "the body names no weights"),
        ("/update_weights", {"path": "/nowhere"}, "/nowhere does not exist on the engine's"),
        ("/update_weights", {"update_info": {"names": ["a"]}}, "update_info"),
        ("/update_weights/chunk", {}, "no update has begun"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}, "is not supported"),
        ("/sleep?level=3", {}, "level=3 is unknown; use 1 or 2"),
        ("/sleep?mode=keep", {}, "a sleep loses the blocks that keep would need"),
        ("/wake_up?tags=gpu", {}, "are unknown; use weights and kv_cache"),
        ("/pause?mode=stop", {}, "mode='stop' is unknown; use abort, wait, keep"),
    ],
)
def test_invalid_trainer_requests_are_rejected(
    http: httpx.Client, path: str, body: dict[str, Any], expected: str
) -> None:
    assert expected in message(http.post(path, json=body))


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ],
)
def test_non_admin_keys_are_rejected(http: httpx.Client, path: str) -> None:
    answer = http.post(path, headers=KEYS, json={} if "weight" in path else None)
    assert "admin_api_key" in message(answer, 403)


def test_async_llm_continues_a_paused_request_with_new_weights(tmp_path: Path) -> None:
    """The output reports the first token that the new weights computed."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}

    async def run() -> None:
        async with await AsyncLLM.create(
            str(checkpoint("qwen3")), max_model_len=64, dtype="float32"
        ) as llm:

            async def read(name: str) -> tuple[list[int], Any]:
                last = None
                async for output in llm.generate(prompt, params, name):
                    last = output.outputs[0]
                    begun.set()
                assert last is not None
                return last.token_ids, last.weights_versions

            begun = asyncio.Event()
            old, _ = await read("old")
            begun.clear()
            running = asyncio.create_task(read("running"))
            await begun.wait()
            await llm.pause_generation(mode="keep", clear_cache=False)
            assert await llm.is_paused()
            assert await llm.update_weights(changed_tensors("qwen3", 1), "new") == "new"
            await llm.resume_generation()
            found, [span] = await running
            assert span.version == "new" and 0 < span.first_token < 40
            assert found[: span.first_token] == old[: span.first_token] and found != old
            new, versions = await read("again")
            assert versions == (WeightsSpan(0, "new"),) and new != old
            with pytest.raises(RequestError, match="lack"):
                await llm.update_weights(
                    {"lm_head.weight": changed_tensors("qwen3", 1)["lm_head.weight"]}
                )
            with pytest.raises(RequestError, match="mode='x' is unknown"):
                await llm.pause_generation(mode="x")

    asyncio.run(run())

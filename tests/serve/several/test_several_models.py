"""`quire serve A B` for its users, with real processes and tiny checkpoints.

Covers `serve/several/manager.py`, `serve/several/served.py`, `serve/several/front.py` and
`serve/several/all_models.py`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.sync.client import connect

from quire import LLM, SamplingParams
from tests.support.models.pooling_checkpoints import with_modules
from tests.support.models.reference_checkpoints import text_checkpoint
from tests.support.processes.servers import Server, children_of, is_running, kill, wait_until

PROMPTS = ["The fox", "Once upon a time", "12 and 7"]
SETTINGS: dict[str, Any] = {"dtype": "float32", "disable_log_stats": True, "max_num_seqs": 4}
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--disable-log-stats")
MEAN = {"pooling_mode": "mean"}


def paths() -> dict[str, Path]:
    return {"a": text_checkpoint("llama"), "b": text_checkpoint("qwen3")}


def started(*arguments: str, **models: Path) -> Server:
    return Server(*(f"{name}={path}" for name, path in models.items()), *FLAGS, *arguments)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = started("--restart-engine", **paths())
    yield server
    assert server.stop() == 0
    assert not any(map(is_running, server.children))


@pytest.fixture(scope="module")
def expected() -> dict[str, list[str]]:
    """Return the answers of each model when it runs alone."""
    found = {}
    params = SamplingParams(temperature=0, max_tokens=12)
    for name, path in paths().items():
        with LLM(str(path), **SETTINGS) as llm:
            found[name] = [o.outputs[0].text for o in llm.generate(PROMPTS, params, False)]
    return found


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def answer(server: Server, model: str, prompt: str, num_tokens: int = 12) -> str:
    made = client_of(server).completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=num_tokens
    )
    assert made.model == model
    return made.choices[0].text


def ask(server: Server, path: str, method: str = "GET", **body: Any) -> tuple[int, str]:
    """Return the status and text of a response."""
    data = json.dumps(body).encode() if body else None
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(server: Server, path: str) -> Any:
    return json.loads(ask(server, path)[1])


def post(server: Server, path: str, **body: Any) -> Any:
    return json.loads(ask(server, path, "POST", **body)[1])


def states(server: Server) -> dict[str, str]:
    return {each["name"]: each["state"] for each in get(server, "/health")["models"]}


def why_of(server: Server, model: str) -> str:
    """Return the fault that /health reports for a model, or an empty text."""
    [found] = [e for e in get(server, f"/health?model={model}")["models"] if e["name"] == model]
    return str(found.get("why", ""))


def card(server: Server, model: str) -> Any:
    return get(server, f"/v1/models/{model}")


def core_of(server: Server, model: str) -> int:
    found = children_of(server.process.pid).items()
    [pid] = [p for p, line in found if "core_main" in line and f"--name {model} " in line]
    return pid


class Streaming:
    """Streams one model in a thread. texts: the deltas so far; error: the exception, if any."""

    def __init__(self, server: Server, model: str) -> None:
        self.texts: list[str] = []
        self.error: Any = None
        self._client = client_of(server)
        self._model = model
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body: Any = {"extra_body": {"ignore_eos": True}, "max_tokens": 100, "temperature": 0}
        try:
            for chunk in self._client.completions.create(
                model=self._model, prompt="The fox", stream=True, **body
            ):
                self.texts.append(chunk.choices[0].text)
        except openai.APIError as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


# ---- several loaded models ---------------------------------------------------------------------


def test_each_model_answers_as_it_does_alone(
    server: Server, expected: dict[str, list[str]]
) -> None:
    assert expected["a"] != expected["b"]
    for number, prompt in enumerate(PROMPTS):
        for name in "ab":
            assert answer(server, name, prompt) == expected[name][number]


def test_request_without_model_goes_to_the_first(
    server: Server, expected: dict[str, list[str]]
) -> None:
    made = post(server, "/v1/completions", prompt=PROMPTS[0], max_tokens=12, temperature=0)
    assert (made["model"], made["choices"][0]["text"]) == ("a", expected["a"][0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/prefixes", {"prompt": "x"}),
    ],
)
def test_unknown_model_is_rejected(server: Server, path: str, body: dict[str, Any]) -> None:
    status, text = ask(server, path, "POST", model="c", **body)
    assert status == 404 and "there is no model" in text and "a, b" in text


def test_models_and_health_report_each_model(server: Server) -> None:
    listed = client_of(server).models.list().data
    assert [(each.id, each.state, each.num_loads) for each in listed] == [  # type: ignore[attr-defined]
        ("a", "loaded", 1), ("b", "loaded", 1),
    ]  # fmt: skip
    assert states(server) == {"a": "loaded", "b": "loaded"}
    assert card(server, "b")["root"] == str(paths()["b"])
    assert ask(server, "/health?model=b")[0] == 200
    assert ask(server, "/health?model=c")[0] == 404
    assert ask(server, "/v1/models/c")[0] == 404


def test_metrics_are_labelled_with_the_model_name(server: Server) -> None:
    for name in "ab":
        answer(server, name, "one more")
    text = ask(server, "/metrics")[1]
    for name in "ab":
        assert re.search(rf'^quire:prompt_tokens_total{{.*model_name="{name}"}} [1-9]', text, re.M)
        assert f'quire:model_state{{model_name="{name}",state="loaded"}} 1' in text
        assert f'quire:model_loads_total{{model_name="{name}"}} 1' in text
    for family in ("quire:prompt_tokens_total", "quire:model_state"):
        assert text.count(f"# TYPE {family} ") == 1


def test_requests_and_prefixes_of_all_models_are_found(server: Server) -> None:
    for name in "ab":
        made = client_of(server).completions.create(model=name, prompt="asked", max_tokens=2)
        assert get(server, f"/v1/requests/{made.id}")["output_tokens"] == 2
    pinned = post(server, "/v1/prefixes", model="b", prompt="a prefix that stays")
    assert [each["id"] for each in get(server, "/v1/prefixes")["data"]] == [pinned["id"]]
    assert ask(server, f"/v1/prefixes/{pinned['id']}", "DELETE")[0] == 200
    for name in "ab":
        made = post(server, "/v1/completions", model=name, prompt="held", max_tokens=2, keep_s=60)
        forked = post(server, f"/v1/requests/{made['id']}/fork", max_tokens=2)
        assert forked["model"] == name and forked["usage"]["prompt_tokens"] > 2
    assert len(get(server, "/v1/requests")["data"]) == 2
    assert ask(server, f"/v1/requests/{made['id']}", "DELETE")[0] == 200
    assert len(get(server, "/v1/requests")["data"]) == 1
    assert post(server, "/reset_prefix_cache") == {"reset": True}
    assert post(server, "/abort_requests") == {"request_ids": []}


def test_tokenize_uses_the_requested_model(server: Server) -> None:
    for name, path in paths().items():
        made = post(server, "/tokenize", model=name, prompt="The fox")
        assert made["max_model_len"] == 128 and made["count"] == len(made["tokens"]) > 0
        assert card(server, name)["root"] == str(path)


def test_live_view_shows_the_requested_model(server: Server) -> None:
    with urllib.request.urlopen(server.url + "/v1/engine/live?model=b", timeout=60) as stream:
        line = next(line for line in stream if line.startswith(b"data: "))
        assert json.loads(line[6:])["type"] == "snapshot"
    assert ask(server, "/v1/engine/live?model=c")[0] == 404


def test_streamed_prompt_goes_to_the_requested_model(
    server: Server, expected: dict[str, list[str]]
) -> None:
    for name in "ab":
        with connect(server.url.replace("http", "ws") + "/v1/stream") as line:
            for fields in (
                {"type": "start", "model": name, "prompt": PROMPTS[0][:3], "max_tokens": 12},
                {"type": "append", "prompt": PROMPTS[0][3:], "last": True},
            ):
                line.send(json.dumps(fields | ({"temperature": 0} if "model" in fields else {})))
            texts, message = [], {"type": ""}
            while message["type"] not in ("done", "error"):
                message = json.loads(line.recv(60))
                texts += [each["text"] for each in message.get("choices", ())]
            assert (message["type"], "".join(texts)) == ("done", expected[name][0])


def test_startup_log_reports_the_memory_of_each_model(server: Server) -> None:
    text = "".join(server.lines)
    assert "memory for 2 models, all at once" in text
    assert re.search(r"INFO quire:   b +weights .* KV pool", text)


def test_dead_model_restarts_while_the_other_answers(
    server: Server, expected: dict[str, list[str]]
) -> None:
    core = core_of(server, "b")
    os.kill(core, signal.SIGSTOP)  # so that its request is open when it dies
    cut = Streaming(server, "b")
    surviving = Streaming(server, "a")
    wait_until(lambda: len(surviving.texts) > 3, "a streams")
    wait_until(lambda: get(server, "/load")["server_load"] == 2, "both are open")
    kill(core)
    wait_until(lambda: ask(server, "/health?model=b")[0] == 503, "the death is noticed")
    wait_until(lambda: "signal 9" in why_of(server, "b"), "the reason is known")
    assert ask(server, "/health?model=a")[0] == ask(server, "/health")[0] == 200
    cut.end()
    assert cut.error is not None and "engine" in str(cut.error)
    surviving.end()
    assert surviving.error is None and len("".join(surviving.texts)) > 0
    assert answer(server, "a", PROMPTS[0]) == expected["a"][0]
    assert answer(server, "b", PROMPTS[0]) == expected["b"][0]  # waits until it is back
    wait_until(lambda: states(server) == {"a": "loaded", "b": "loaded"}, "both are back")
    assert [card(server, name)["num_loads"] for name in "ab"] == [1, 2]
    assert ask(server, "/health?model=b")[0] == 200 and why_of(server, "b") == ""


# ---- loading and unloading ---------------------------------------------------------------------


@pytest.mark.slow
def test_two_models_take_turns_in_memory_for_one(expected: dict[str, list[str]]) -> None:
    """Clients of both models call two API processes concurrently; all of them are served."""
    server = started("--max-loaded-models", "1", "--api-server-count", "2", **paths())
    assert states(server) == {"a": "loaded", "b": "unloaded"}
    assert card(server, "b")["max_model_len"] is None
    failures: list[str] = []

    def ask(name: str) -> None:
        for number, prompt in list(enumerate(PROMPTS)) * 2:
            if answer(server, name, prompt) != expected[name][number]:
                failures.append(f"{name} {number}")

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert card(server, "b")["num_loads"] >= 1 and card(server, "b")["max_model_len"] == 128
    wait_until(
        lambda: sorted(states(server).values()) == ["loaded", "unloaded"], "one model is loaded"
    )
    assert server.stop() == 0


@pytest.mark.slow
def test_idle_model_is_unloaded_and_loads_again(expected: dict[str, list[str]]) -> None:
    server = started("--idle-unload-s", "1.5", a=paths()["a"])
    core = core_of(server, "a")
    wait_until(lambda: states(server) == {"a": "unloaded"}, "it is unloaded")
    assert not is_running(core)
    assert ask(server, "/health")[0] == 200
    assert ask(server, "/ready")[0] == 200
    assert ask(server, "/tokenize", "POST", model="a", prompt="x")[0] == 200  # without loading
    assert states(server) == {"a": "unloaded"}
    streams = [Streaming(server, "a") for _ in range(3)]  # all wait for one load
    for stream in streams:
        stream.end()
        assert stream.error is None
    assert answer(server, "a", PROMPTS[1]) == expected["a"][1]
    assert card(server, "a")["num_loads"] in (2, 3)
    assert server.stop() == 0


@pytest.mark.slow
def test_failed_load_is_reported_and_the_server_stays_up(
    tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    broken = tmp_path / "b"
    shutil.copytree(paths()["b"], broken)
    server = started("--max-loaded-models", "1", a=paths()["a"], b=broken)
    weights = (broken / "model.safetensors").rename(tmp_path / "weights")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="model b is not available") as caught:
            answer(server, "b", "x")
        assert caught.value.status_code == 503 and "Retry-After" in caught.value.response.headers
    assert states(server) == {"a": "unloaded", "b": "failed"}
    assert str(broken) in card(server, "b")["why"]  # the core's last message
    assert ask(server, "/health")[0] == 200
    assert ask(server, "/health?model=b")[0] == 503
    assert answer(server, "a", PROMPTS[0]) == expected["a"][0]
    weights.rename(broken / "model.safetensors")
    wait_until(lambda: _is_back(server, "b"), "the load is retried")
    assert answer(server, "b", PROMPTS[0]) == expected["b"][0]
    assert server.stop() == 0


def _is_back(server: Server, name: str) -> bool:
    with contextlib.suppress(openai.InternalServerError):
        return bool(answer(server, name, "x"))
    time.sleep(0.5)  # do not poll too often
    return False


@pytest.mark.slow
def test_without_restart_engine_the_last_dead_model_ends_the_server() -> None:
    server = started(**paths())
    kill(core_of(server, "b"))
    wait_until(lambda: states(server) == {"a": "loaded", "b": "dead"}, "the death is noticed")
    with pytest.raises(openai.InternalServerError, match="signal 9"):
        answer(server, "b", "x")
    assert ask(server, "/health?model=b")[0] == 503
    assert ask(server, "/health")[0] == 200
    assert answer(server, "a", "x")
    kill(core_of(server, "a"))
    assert server.process.wait(60) == 1
    server.wait_for_line("no model is left to serve")


@pytest.mark.slow
def test_stop_waits_for_requests_that_wait_for_a_model() -> None:
    server = started("--max-loaded-models", "1", **paths())
    stream = Streaming(server, "b")
    wait_until(lambda: get(server, "/load")["server_load"] == 1, "the request is open")
    assert states(server)["b"] != "loaded" and not stream.texts
    assert server.stop() == 0
    stream.end()
    assert stream.error is None and len("".join(stream.texts)) > 0


@pytest.mark.slow
def test_config_file_gives_each_model_its_own_settings(tmp_path: Path) -> None:
    """An embedder and a generator with several names, a batch that names both, and an API key."""
    embedder = with_modules(paths()["b"], ("Pooling", "1_Pooling", MEAN))
    config = tmp_path / "quire.yaml"
    config.write_text(
        "max-num-seqs: 4\ndisable-log-stats: true\napi-key: none\n"
        f"files-dir: {tmp_path / 'files'}\nmodels:\n"
        f"  - model: {paths()['a']}\n    name: [text, other]\n    max-model-len: 64\n"
        f"  - model: {embedder}\n    name: vectors\n",
        encoding="utf-8",
    )
    server = Server("--config", str(config), "--max-loaded-models", "1")
    client = client_of(server)
    assert [each.id for each in client.models.list().data] == ["text", "other", "vectors"]
    assert client.models.retrieve("other").max_model_len == 64  # type: ignore[attr-defined]
    assert ask(server, "/health") == (200, "")  # only key holders may see model names
    assert ask(server, "/health?model=text")[0] == ask(server, "/health?model=no")[0] == 401
    assert answer(server, "other", "The fox") == answer(server, "text", "The fox")
    assert len(client.embeddings.create(model="vectors", input="The fox").data[0].embedding) > 1
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="text", input="x")
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(
            [{"model": "text", "prompt": "x", "max_tokens": 2}, {"model": "no", "prompt": "x"}]
        )
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "it is done")
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None and (counts.completed, counts.failed) == (1, 1)
    assert server.stop() == 0

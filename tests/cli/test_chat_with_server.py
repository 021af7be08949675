"""`quire chat --url`: with the API of `quire serve`, and with servers that are absent, silent or
different."""

import io
import socket
import sys
from collections.abc import Iterator

import pytest

from quire.base.settings.config import ServerConfig, config_from_flat
from quire.cli.chat_targets import ServerTarget
from quire.engine.start.build import build_engine
from quire.serve.context import ApiContext
from tests.serve.api.conftest import serving
from tests.support.commands import run
from tests.support.http_server import Seen, Send, send_json
from tests.support.processes.servers import wait_until
from tests.support.serve.fake_client import FakeClient
from tests.support.serve.fake_openai import FakeOpenAI, running

KEY = "open-sesame"
OPTIONS = ("--temperature", "0", "--max-tokens", "12")
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server in a thread of this process, which also runs the engine's steps."""
    engine = build_engine(config_from_flat(model="demo", max_model_len=96, disable_log_stats=True))
    client, config = FakeClient(engine), ServerConfig(api_key=(KEY,))
    context = ApiContext(client, engine.renderer, engine.requests, ("demo",), config, 1_700_000_000)
    with serving(context) as url:
        yield url
    engine.client.close()


def chat(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    *arguments: str,
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(capsys, "chat", *arguments)


def test_server_and_local_model_give_equal_chats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Turns are removed as well. The key may come from the environment."""
    text = "Hello!\nTell me a story.\nWho are you?\nWhat is 1 + 1?\n"
    local = chat(capsys, monkeypatch, text, "--max-model-len", "96", *OPTIONS)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    remote = chat(capsys, monkeypatch, text, "--url", url, *OPTIONS)
    assert remote[:2] == local[:2]
    assert local[0] == 0 and len(local[1].splitlines()) == 4
    assert "removed the oldest" in local[2] and "removed the oldest" in remote[2]


def test_missing_key_and_unknown_model_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    status, out, err = chat(capsys, monkeypatch, "Hello!\n", "--url", url)
    assert (status, out) == (1, "") and "needs an API key" in err
    key = ("--url", url + "/v1", "--api-key", KEY)
    status, out, err = chat(capsys, monkeypatch, "Hello!\n", "nothing", *key)
    assert (status, out) == (1, "") and "nothing" in err and "404" in err
    status, out, err = chat(capsys, monkeypatch, "Hello!\n", "demo", *key, "--temperature", "9")
    assert (status, out) == (1, "") and "temperature" in err and "400" in err


def test_abandoned_answer_ends_on_the_server(url: str) -> None:
    sampling = {"max_tokens": 80, "ignore_eos": True, "temperature": 0}
    target = ServerTarget(url, KEY, None, sampling)
    try:
        assert target.model == "demo"
        assert sum(1 for _ in target.answer(HELLO, lambda: True)) <= 2
        (count, limit) = target.size(HELLO) or (0, 0)
        assert 1 < count < limit == 96
        pieces = [*target.answer(HELLO, lambda: False)]
        assert pieces[-1].finish_reason == "length"
    finally:
        target.close()
    wait_until(lambda: _load(url) == 0)


def _load(url: str) -> int:
    target = ServerTarget(url, KEY, "demo", {})
    try:
        return int(target._runner.run(target._client.request("/load")).json()["server_load"])
    finally:
        target.close()


def test_ctrl_c_works_while_a_server_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = ServerTarget(f"http://127.0.0.1:{silent.getsockname()[1]}", None, "any", {})
        looks = iter([False, False, True, True])
        assert [*target.answer(HELLO, lambda: next(looks))] == []
        target.close()


def test_missing_server_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = chat(capsys, monkeypatch, "Hello!\n", "--url", "http://127.0.0.1:9")
    assert (status, out) == (1, "")
    assert "nothing answers at http://127.0.0.1:9" in err


class WithoutTokenize(FakeOpenAI):
    async def answer(self, seen: Seen, send: Send) -> None:
        if seen.path == "/tokenize":
            await send_json(send, {"detail": "Not Found"}, 404)
        else:
            await super().answer(seen, send)


def test_server_without_tokenize_keeps_all_turns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's own API has no /tokenize, so no turn is removed."""
    fake = WithoutTokenize()
    with running(fake) as url:
        status, out, _ = chat(
            capsys, monkeypatch, "Hello!\nAgain!\n", "--url", url, "--max-tokens", "4"
        )
    assert (status, out) == (0, "abab\nabab\n")
    assert [len(body["messages"]) for body in fake.bodies] == [1, 3]
    assert fake.bodies[0]["model"] == "fake" and fake.bodies[0]["max_tokens"] == 4
    assert "temperature" not in fake.bodies[0]


class OtherTokenize(FakeOpenAI):
    """A server whose /tokenize answers as llama.cpp's does, and which lists no models."""

    async def answer(self, seen: Seen, send: Send) -> None:
        if seen.path in ("/tokenize", "/v1/models"):
            await send_json(send, {"tokens": [1, 2]})
        else:
            await super().answer(seen, send)


def test_server_with_another_tokenize_format_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(OtherTokenize()) as url:
        arguments = ("--url", url, "--max-tokens", "4")
        status, out, _ = chat(capsys, monkeypatch, "Hello!\nAgain!\n", "some-model", *arguments)
        assert (status, out) == (0, "abab\nabab\n")
        status, _, err = chat(capsys, monkeypatch, "Hello!\n", *arguments)
    assert status == 1 and "lists no model; name one with --model" in err

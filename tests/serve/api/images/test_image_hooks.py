"""Hooks see image digests and may reorder or remove images; batches may contain images."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from quire.base.messages import RetainedRequest
from quire.base.requests.hooks import HookRequest
from quire.base.requests.media_items import MediaItem
from quire.serve.app import create_app
from quire.serve.hooks.hooks import Hooks
from tests.serve.api.images.conftest import (
    MakeImageContext,
    chat_part,
    data_url,
    file_of,
    picture,
    text_part,
)
from tests.support.serve.batch_server import serving
from tests.support.serve.fake_client import FakeClient

PNG, JPEG = file_of(picture()), file_of(picture(seed=1), "JPEG")
CONTENT = [text_part("Hi"), chat_part(data_url(PNG)), chat_part(data_url(JPEG, "image/jpeg"))]
BODY = {"messages": [{"role": "user", "content": CONTENT}], "max_tokens": 1}
Change = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


class Watcher:
    """A hook that records requests, and changes the parts of their only message."""

    def __init__(self) -> None:
        self.seen: list[HookRequest] = []
        self.change: Change = list

    def before_admission(self, request: HookRequest) -> HookRequest:
        self.seen.append(request)
        assert request.messages is not None
        [message] = request.messages
        return replace(request, messages=[{**message, "content": self.change(message["content"])}])


@pytest.fixture(scope="module")
def server(images: MakeImageContext) -> Iterator[tuple[Watcher, TestClient, FakeClient]]:
    context, watcher = images(), Watcher()
    context.hooks = Hooks([watcher])
    assert isinstance(context.client, FakeClient)
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield watcher, client, context.client


@pytest.fixture
def watched(
    server: tuple[Watcher, TestClient, FakeClient],
) -> tuple[Watcher, TestClient, FakeClient]:
    """The server, with its hook reset: nothing recorded, nothing changed."""
    server[0].seen, server[0].change = [], list
    return server


def ask(client: TestClient) -> Any:
    return client.post("/v1/chat/completions", json=BODY)


def test_hooks_see_image_digests(watched: tuple[Watcher, TestClient, FakeClient]) -> None:
    watcher, client, engine = watched
    assert ask(client).status_code == 200
    digests = [hashlib.sha256(data).hexdigest() for data in (PNG, JPEG)]
    assert watcher.seen[0].messages is not None
    assert watcher.seen[0].messages[0]["content"] == [
        text_part("Hi"), *({"type": "image", "sha256": each} for each in digests)
    ]  # fmt: skip
    assert len(engine.requests[-1].media) == 2


@pytest.mark.parametrize(
    ("change", "order"),
    [(lambda parts: parts[:2], [0]), (lambda parts: parts[::-1], [1, 0]),
     (lambda parts: [*parts, parts[1]], [0, 1, 0]), (lambda parts: parts[:1], [])],
)  # fmt: skip
def test_hooks_may_reorder_repeat_and_remove_images(
    watched: tuple[Watcher, TestClient, FakeClient], change: Change, order: list[int]
) -> None:
    watcher, client, engine = watched
    assert ask(client).status_code == 200
    digests = [item.digest for item in engine.requests[-1].media]
    watcher.change = change
    assert ask(client).status_code == 200
    assert [item.digest for item in engine.requests[-1].media] == [digests[at] for at in order]


def test_hook_cannot_add_an_unknown_image(watched: tuple[Watcher, TestClient, FakeClient]) -> None:
    watcher, client, _ = watched
    watcher.change = lambda parts: [*parts, {"type": "image", "sha256": "0" * 64}]
    answer = ask(client)
    assert answer.status_code == 500
    assert "returned an image that the request does not hold" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_changed", [True, False])
def test_fork_never_computes_image_tokens_as_text(
    images: MakeImageContext, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    """Either a hook changes the prompt, or the engine no longer has the source's images."""

    class Changer:
        def before_admission(self, request: HookRequest) -> HookRequest:
            return replace(request, prompt="changed") if is_changed else request

    tokens = np.array([5, 0, 6], np.int32).tobytes()
    image = MediaItem(1, 1, bytes(32))
    source = RetainedRequest("chat", 0, 3, 3, 0, 9.0, "", "", 9.0, tokens, media=(image,))

    async def held(*given: object) -> list[RetainedRequest]:
        return [source]

    context = images()
    context.hooks = Hooks([Changer()])
    monkeypatch.setattr(context.client, "held", held)
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        answer = client.post("/v1/requests/chat/fork", json={"prompt": " b", "max_tokens": 1})
    text = "holds images" if is_changed else "no longer has the 1 images"
    assert answer.status_code == (500 if is_changed else 400), answer.text
    assert text in answer.json()["error"]["message"]


def test_batch_lines_may_contain_images(images: MakeImageContext, tmp_path: Path) -> None:
    bodies = [BODY, BODY | {"messages": [{"role": "user", "content": [{"type": "image_pil"}]}]}]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    with serving(images, tmp_path, max_body_bytes=1024) as server:
        batch = server.wait_for(server.begin(lines)["id"], "completed", "failed")
        counts = batch["request_counts"]
        assert (counts["completed"], counts["failed"]) == (1, 1)
        assert "an object of Python" in json.dumps(server.lines(batch["error_file_id"]))

"""Unsupported endpoints of other servers give the reason and the alternative.

Covers `serve/native/refused.py`.
"""

import openai
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from quire.serve.app import create_app
from quire.serve.native.refused import REFUSED
from tests.serve.api.conftest import MakeContext


@pytest.mark.parametrize("path", REFUSED)
def test_refused_paths_and_all_below_give_the_reason(api: TestClient, path: str) -> None:
    for method, below in (("GET", ""), ("POST", ""), ("POST", "/a/b"), ("DELETE", "/a")):
        response = api.request(method, f"{path}{below}", content=b"\xff no JSON")
        assert response.status_code == 501
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert error["message"] == f"{path} is not supported: {REFUSED[path]}."
        if path.startswith("/v1/messages"):
            assert error["type"] == "api_error"
        else:
            assert error["code"] == "unsupported_endpoint"


def test_similar_paths_stay_unknown(api: TestClient) -> None:
    for path in ("/v1/audios", "/v1/nothing", "/audio/speech", "/api/v10", "/infos"):
        assert api.post(path).status_code == 404


def test_key_is_checked_before_the_refusal(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context(api_key=("k",)))) as client:
        assert client.post("/v1/moderations").status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert client.post("/v1/moderations", headers=headers).status_code == 501


def test_openais_client_gets_the_reason_and_does_not_retry(
    server_url: str, openai_client: openai.OpenAI
) -> None:
    client = openai_client.with_options(max_retries=5)
    for call in (
        lambda: client.audio.transcriptions.create(file=b"RIFF", model="demo"),
        lambda: client.images.generate(prompt="a fox", model="demo"),
        lambda: client.moderations.create(input="a fox"),
        lambda: client.fine_tuning.jobs.list(),
    ):
        with pytest.raises(openai.InternalServerError, match="is not supported") as raised:
            call()
        assert raised.value.status_code == 501


def test_the_realtime_socket_is_refused(api: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), api.websocket_connect("/v1/realtime?model=demo"):
        pass


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
def test_tgi_body_on_a_shared_path_gets_the_right_field_name(api: TestClient, path: str) -> None:
    """text-generation-inference (TGI) has the same paths."""
    response = api.post(path, json={"inputs": "fox", "parameters": {"max_new_tokens": 3}})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "inputs" and "prompt" in error["message"]

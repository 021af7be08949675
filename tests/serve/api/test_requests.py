"""GET /v1/requests/{id}: a request's timeline, for the key that made it."""

import pytest
from starlette.testclient import TestClient

from quire.serve.app import create_app
from tests.serve.api.conftest import MODEL, MakeContext

BODY = {"model": MODEL, "prompt": "The sea", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def test_completion_and_chat_have_a_timeline(api: TestClient) -> None:
    answer = api.post("/v1/completions", json=BODY).json()
    timeline = api.get(f"/v1/requests/{answer['id']}").json()
    assert (timeline["object"], timeline["state"]) == ("request.timeline", "finished")
    assert timeline["id"].startswith(answer["id"])
    assert timeline["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (timeline["output_tokens"], timeline["finish_reason"]) == (4, "length")
    assert 0 <= timeline["admitted_ms"] <= timeline["first_token_ms"] <= timeline["finished_ms"]
    assert timeline["in_words"][-1].startswith("ended after ")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = api.post("/v1/chat/completions", json=chat).json()
    assert api.get(f"/v1/requests/{answer['id']}").json()["id"] == answer["id"]


def test_several_prompts_give_a_list_of_timelines(api: TestClient) -> None:
    answer = api.post("/v1/completions", json=BODY | {"prompt": ["The sea", "A fox"]}).json()
    timeline = api.get(f"/v1/requests/{answer['id']}").json()
    assert timeline["object"] == "list" and len(timeline["data"]) == 2


def test_unknown_ids_are_not_found(api: TestClient) -> None:
    for name in ("cmpl-nothing", "x" * 500, "%00", "%E2%82%AC"):
        response = api.get(f"/v1/requests/{name}")
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
        assert len(error["message"]) < 500


def test_timeline_is_visible_only_to_its_key(make_context: MakeContext) -> None:
    """Other keys get a 404, as for an unknown id; requests without a key get a 401."""
    app = create_app(make_context(api_key=("one", "two")))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with TestClient(app) as api:
        answer = api.post("/v1/completions", json=BODY, headers=one).json()
        path = f"/v1/requests/{answer['id']}"
        assert api.get(path, headers=one).json()["state"] == "finished"
        assert api.get(path, headers=two).status_code == 404
        assert api.get(path).status_code == 401


def test_admin_key_sees_all_timelines(make_context: MakeContext) -> None:
    app = create_app(make_context(api_key=("one", "boss"), admin_api_key=("boss",)))
    one, boss = ({"Authorization": f"Bearer {key}"} for key in ("one", "boss"))
    with TestClient(app) as api:
        body = {"prompt": "Once", "max_tokens": 1}
        mine = api.post("/v1/completions", json=body, headers=one).json()["id"]
        others = api.post("/v1/completions", json=body, headers=boss).json()["id"]
        assert api.get(f"/v1/requests/{mine}", headers=boss).status_code == 200
        assert api.get(f"/v1/requests/{others}", headers=one).status_code == 404


@pytest.mark.parametrize("method", ["post", "put"])
def test_timeline_is_read_only(api: TestClient, method: str) -> None:
    assert getattr(api, method)("/v1/requests/cmpl-1").status_code == 405

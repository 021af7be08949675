"""/reset_prefix_cache and /abort_requests: effects and permissions."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MakeContext
from tests.support.processes.servers import wait_until
from tests.support.serve.fake_client import FakeClient

KEYS = ("one", "two", "boss")
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
LONG = {"prompt": list(range(5, 45)), "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def cached(api: TestClient, **more: Any) -> int:
    answer = api.post("/v1/completions", json=LONG, **more).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_reset_prefix_cache_drops_cached_prefixes(api: TestClient) -> None:
    cached(api)
    assert cached(api) > 0
    assert api.post("/reset_prefix_cache").status_code == 200
    assert cached(api) == 0
    refused = api.post("/reset_prefix_cache?reset_running_requests=true")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "reset_running_requests"


@pytest.fixture
def locked(make_context: MakeContext) -> ApiContext:
    return make_context(api_key=KEYS, admin_api_key=KEYS[2:])


def test_reset_prefix_cache_needs_an_admin_key(
    locked: ApiContext, make_context: MakeContext
) -> None:
    with TestClient(create_app(locked)) as api:
        assert api.post("/reset_prefix_cache").status_code == 401
        refused = api.post("/reset_prefix_cache", headers=bearer("one"))
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "not_an_admin"
        assert api.post("/reset_prefix_cache", headers=bearer("boss")).status_code == 200
    with TestClient(create_app(make_context(api_key=KEYS))) as api:  # no admin key
        assert api.post("/reset_prefix_cache", headers=bearer("boss")).status_code == 403


def test_admin_key_must_be_an_api_key_and_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="admin_api_key has 1 of 1 keys") as raised:
        ServerConfig(api_key=("one",), admin_api_key=("s3cret",))
    assert "s3cret" not in str(raised.value)


def test_keys_abort_their_own_requests_and_admin_keys_all(locked: ApiContext) -> None:
    client = locked.client
    assert isinstance(client, FakeClient)
    with TestClient(create_app(locked)) as api, ThreadPoolExecutor(2) as pool:
        client.hold(after_steps=2)
        call = {"url": "/v1/completions", "json": ENDLESS}
        pending = {key: pool.submit(api.post, **call, headers=bearer(key)) for key in KEYS[:2]}
        wait_until(lambda: client.num_generated == 2)
        id_by_tenant = {request.tenant: request.request_id for request in client.requests}
        ids = [id_by_tenant["key 1"], id_by_tenant["key 2"]]

        def abort(key: str, body: dict[str, Any] | None) -> list[str]:
            answer = api.post("/abort_requests", json=body, headers=bearer(key))
            assert answer.status_code == 200, answer.text
            ended: list[str] = answer.json()["request_ids"]
            return ended

        assert abort("one", {"request_ids": ids}) == ids[:1], "other keys' requests are not found"
        assert abort("one", {"request_ids": ["cmpl-nothing"]}) == []
        client.release()
        ended = pending["one"].result(timeout=30).json()["choices"][0]
        assert ended["finish_reason"] == "abort"
        client.hold()
        assert abort("boss", None) == ids[1:]
        client.release()
        assert pending["two"].result(timeout=30).json()["choices"][0]["finish_reason"] == "abort"
        assert api.post("/abort_requests", headers=bearer("one")).json() == {"request_ids": []}


@pytest.mark.parametrize("body", [{"request_ids": "a"}, {"request_ids": ["x"] * 1025}, {"ids": []}])
def test_invalid_abort_bodies_are_refused(api: TestClient, body: Any) -> None:
    assert api.post("/abort_requests", json=body).status_code == 400

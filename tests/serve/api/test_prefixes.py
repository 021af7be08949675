"""Pinned prefixes over HTTP: responses, errors, ownership, and clients that disconnect."""

import asyncio
import http.client
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from quire.base.messages import PinnedPrefix
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.observability.exposition import Exposition
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.start.build import Engine, build_engine
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MODEL, serving
from tests.serve.api.test_sse import hang_up, open_connection
from tests.support.processes.servers import wait_until
from tests.support.serve.fake_client import FakeClient

URL = "/v1/prefixes"
IDS = list(range(5, 45))  # 2 blocks of 16, and 8 tokens
LONG = list(range(5, 305))
SYSTEM = {
    "role": "system",
    "content": "You are a fox who lives in the forest and tells children stories, in rhymes.",
}
HI = {"role": "user", "content": "Hi"}


class PinClient(FakeClient):
    """A client whose `prefixes` waits while the event `answers` is cleared."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_calls = 0

    @property
    def core(self) -> Any:
        return self.engine.client.core

    async def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        self.num_calls += 1
        await self.answers.wait()
        return await super().prefixes(tenant)

    def names(self) -> list[str]:
        return [prefix.id for prefix in self.core.prefixes()]


@pytest.fixture(scope="module")
def small() -> Iterator[Engine]:
    """An engine with 42 blocks, enough for one request of the maximum length."""
    engine = build_engine(
        config_from_flat(
            model=MODEL,
            max_num_seqs=4,
            max_model_len=512,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=2 << 20,
            disable_log_stats=True,
        )
    )
    yield engine
    engine.client.close()


def context_of(engine: Engine, **server: Any) -> ApiContext:
    config = ServerConfig(**server)
    client = PinClient(engine)
    return ApiContext(client, engine.renderer, engine.requests, (MODEL,), config, 1_700_000_000)


@pytest.fixture
def context(small: Engine) -> Iterator[ApiContext]:
    """Nothing is pinned or cached before; the test must leave no block in use."""
    small.client.reset_prefix_cache()
    context = context_of(small)
    yield context
    wait_until(lambda: client_of(context).num_unfinished == 0 and context.num_open == 0)
    for name in client_of(context).names():
        small.client.unpin(name)
    assert all(pool.num_used == 0 for pool in small.client.core.scheduler.memory.kv.pools)


@pytest.fixture
def api(context: ApiContext) -> Iterator[TestClient]:
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def url(context: ApiContext) -> Iterator[str]:
    """The URL of a real server."""
    with serving(context) as url:
        yield url


def client_of(context: ApiContext) -> PinClient:
    assert isinstance(context.client, PinClient)
    return context.client


def pin(api: TestClient, **body: Any) -> Any:
    answer = api.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(api: TestClient, prompt: object, **body: Any) -> Any:
    """Return a completion's text and its number of cached tokens."""
    wanted = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | body
    answer = api.post("/v1/completions", json=wanted).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


# ---- responses ---------------------------------------------------------------------------------


def test_pins_are_described_listed_and_deleted(api: TestClient) -> None:
    assert api.get(URL).json() == {"object": "list", "data": []}
    one = pin(api, prompt=IDS, model=MODEL)
    assert one["id"].startswith("prefix-")
    assert one | {"id": "", "age_s": 0} == {
        "id": "", "object": "prefix", "status": "ready", "num_tokens": 40, "num_blocks": 3,
        "num_hits": 0, "age_s": 0, "expires_in_s": None,
    }  # fmt: skip
    assert 0 <= one["age_s"] < 60
    two = pin(api, prompt="Once upon a time", ttl_s=600)
    assert 590 < two["expires_in_s"] <= 600
    listed = api.get(URL).json()
    assert listed["object"] == "list"
    assert [prefix["id"] for prefix in listed["data"]] == [one["id"], two["id"]]
    shown = api.get(f"{URL}/{two['id']}").json()
    assert (shown["id"], shown["num_tokens"]) == (two["id"], two["num_tokens"])
    assert api.delete(f"{URL}/{one['id']}").json() == {
        "id": one["id"], "object": "prefix", "deleted": True,
    }  # fmt: skip
    assert [prefix["id"] for prefix in api.get(URL).json()["data"]] == [two["id"]]


@pytest.mark.parametrize("kind", ["ids", "text", "messages"])
def test_pinned_prefix_is_a_prefix_hit_to_its_last_token(
    api: TestClient, context: ApiContext, kind: str
) -> None:
    """All 40 token ids are cached; the prefix cache alone would have the 32 of full blocks."""
    if kind == "messages":
        body: dict[str, Any] = {"messages": [SYSTEM]}
        wanted = {"messages": [SYSTEM, HI], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        path = "/v1/chat/completions"
    else:
        prefix: Any = IDS if kind == "ids" else "Once upon a time, there was a little girl named"
        body = {"prompt": prefix}
        rest: Any = [300, 301] if kind == "ids" else " Lily. She"
        wanted = {"prompt": prefix + rest, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        path = "/v1/completions"
    before = api.post(path, json=wanted).json()
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    context.client.engine.client.reset_prefix_cache()  # type: ignore[attr-defined]
    found = pin(api, **body)
    after = api.post(path, json=wanted).json()
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == found["num_tokens"]
    assert found["num_tokens"] % 16, "the prefix must end inside a block"
    assert api.get(f"{URL}/{found['id']}").json()["num_hits"] == 1


def test_salted_prefix_serves_only_requests_with_its_salt(api: TestClient) -> None:
    pin(api, prompt=IDS, cache_salt="mine")
    assert ask(api, [*IDS, 300])[1] == 0
    assert ask(api, [*IDS, 300], cache_salt="mine")[1] == 40


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hello there", "add_special_tokens": False},
        {"messages": [SYSTEM], "chat_template_kwargs": {"unused": 1}},
    ],
)
def test_prefix_has_the_tokens_that_tokenize_returns(api: TestClient, body: Any) -> None:
    """For messages, without the generation prompt."""
    wanted = body | ({"add_generation_prompt": False} if "messages" in body else {})
    count = api.post("/tokenize", json=wanted).json()["count"]
    assert pin(api, **body)["num_tokens"] == count


def test_metrics_report_pins_and_their_hits(api: TestClient, small: Engine) -> None:
    """Hits are totals since the start; pins are the current numbers."""
    core, config = small.client.core, small.config
    metrics = EngineMetrics(core.scheduler.rows.table.num_rows, 512, counts_hits=True)
    exposition = Exposition(metrics, core.view, MODEL, config.cache)

    def numbers() -> list[float]:
        families = text_string_to_metric_families(exposition.text())
        samples = [sample for family in families for sample in family.samples]
        found = {sample.name: sample.value for sample in samples}
        names = ["prefixes", "kv_blocks", "prefix_hits_total", "prefix_hit_tokens_total"]
        return [found[f"quire:pinned_{name}"] for name in names]

    before = numbers()
    pin(api, prompt=IDS)
    pin(api, prompt="Hello")
    for i in range(3):
        ask(api, [*IDS, 300 + i])
    change = [after - was for after, was in zip(numbers(), before, strict=True)]
    assert change == [2, 4, 3, 120]


def test_openapi_schema_has_the_routes(api: TestClient) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    assert set(paths[URL]) == {"post", "get"}
    assert set(paths[URL + "/{prefix_id}"]) == {"get", "delete"}
    body = paths[URL]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/PrefixBody")


def test_openai_client_works_with_pinned_prefixes(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = []
        for pins in (False, True):
            if pins:
                found = client.post("/prefixes", body={"messages": [SYSTEM]}, cast_to=object)
                assert isinstance(found, dict) and found["status"] == "ready"
            answers.append(
                client.chat.completions.create(
                    model=MODEL, messages=[SYSTEM, HI], max_tokens=9, temperature=0
                )
            )
        text, pinned = [answer.choices[0].message.content for answer in answers]
        assert text == pinned
        assert answers[1].usage is not None and answers[1].usage.prompt_tokens_details is not None
        assert answers[1].usage.prompt_tokens_details.cached_tokens == found["num_tokens"]
        stream = client.completions.create(
            model=MODEL, prompt=IDS, max_tokens=5, stream=True, extra_body={"ignore_eos": True}
        )
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "give either prompt"),
        ({"prompt": "a", "messages": [HI]}, "prompt", "give either prompt"),
        ({"prompt": ""}, "prompt", "not empty"),
        ({"prompt": []}, "prompt", "got an empty list"),
        ({"prompt": 5}, "prompt", "got 5"),
        ({"prompt": ["a", "b"]}, "prompt", "got a list of 2"),
        ({"prompt": [-1]}, "prompt", "got a list of 1"),
        ({"prompt": [True]}, "prompt", "got a list of 1"),
        ({"prompt": [99999]}, "prompt", "token id 99999 is not in the vocabulary"),
        ({"prompt": [5] * 512}, "prompt", "max_model_len - 1 = 511"),
        ({"prompt": [5] * 340}, "prompt", "22 of 42 KV blocks, and the limit is half of them"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools", "messages only"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "messages"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "Hi"}, "messages", "must be a list"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs a content"),
        ({"messages": [HI | {"content": "Hi " * 490}]}, "messages", "half of them|max_model_len"),
        ({"prompt": "a", "ttl_s": -1}, "ttl_s", "got -1.0"),
        ({"prompt": "a", "ttl_s": math.nan}, "ttl_s", "got nan"),
        ({"prompt": "a", "ttl_s": math.inf}, "ttl_s", "got inf"),
        ({"prompt": "a", "ttl_s": "soon"}, "ttl_s", 'got "soon"'),
        ({"prompt": "a", "ttl": 5}, "ttl", "did you mean 'ttl_s'"),
        ({"prompt": "a", "stream": True}, "stream", "there is no field"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "of 1 or more characters"),
    ],
)
def test_bad_bodies_are_refused(
    api: TestClient, body: dict[str, Any], param: str, message: str
) -> None:
    answer = api.post(URL, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert any(part in error["message"] for part in message.split("|")), error["message"]
    assert api.get(URL).json()["data"] == []


def test_missing_prefixes_and_models_are_not_found(api: TestClient) -> None:
    gone = pin(api, prompt=IDS)["id"]
    assert api.delete(f"{URL}/{gone}").is_success
    for answer in (
        api.get(f"{URL}/{gone}"),
        api.delete(f"{URL}/{gone}"),
        api.delete(f"{URL}/other"),
        api.post(URL, json={"prompt": IDS, "model": "other"}),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] in ("not_found", "model_not_found")
    assert "GET /v1/prefixes" in api.get(f"{URL}/x").json()["error"]["message"]


def test_draining_server_refuses_new_pins(api: TestClient, context: ApiContext) -> None:
    existing = pin(api, prompt=IDS)["id"]
    context.draining = True
    answer = api.post(URL, json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in answer.headers
    assert client_of(context).names() == [existing]


def test_pin_on_a_dead_engine_is_a_503(api: TestClient, context: ApiContext) -> None:
    client_of(context).kill()
    answer = api.post(URL, json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


# ---- ownership ---------------------------------------------------------------------------------


def test_key_sees_and_deletes_only_its_own_pins(small: Engine, context: ApiContext) -> None:
    locked = context_of(small, api_key=("one", "two"))
    with TestClient(create_app(locked)) as api:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"prompt": IDS, "user": "somebody"}
        mine = api.post(URL, json=body, headers=one).json()["id"]
        theirs = api.post(URL, json=body, headers=two).json()["id"]
        for headers, own, other in ((one, mine, theirs), (two, theirs, mine)):
            listed = api.get(URL, headers=headers).json()["data"]
            assert [prefix["id"] for prefix in listed] == [own]
            assert api.get(f"{URL}/{own}", headers=headers).is_success
            assert api.get(f"{URL}/{other}", headers=headers).status_code == 404
            assert api.delete(f"{URL}/{other}", headers=headers).status_code == 404
        assert sorted(client_of(context).names()) == sorted([mine, theirs])
        assert api.delete(f"{URL}/{mine}", headers=one).is_success
        assert client_of(context).names() == [theirs]
        for answer in (api.get(URL), api.post(URL, json=body), api.delete(f"{URL}/{theirs}")):
            assert answer.status_code == 401


def test_each_key_pins_up_to_its_share(small: Engine, context: ApiContext) -> None:
    """By default half of the 42 blocks, in even shares of ten; `pin_share` overrides it."""
    for settings, max_blocks in (({}, 10), ({"pin_share": 0.25}, 5), ({"pin_share": 1.0}, 21)):
        locked = context_of(small, api_key=("one", "two", "one"), **settings)
        with TestClient(create_app(locked)) as api:
            for key in ("one", "two") if max_blocks <= 10 else ("one",):
                headers = {"Authorization": f"Bearer {key}"}
                large = {"prompt": [5] * (16 * max_blocks + 1)}
                answer = api.post(URL, json=large, headers=headers)
                assert answer.status_code == 400
                own = f"share is {max_blocks} of 42. Remove"
                wanted = own if max_blocks < 21 else "the limit is half of them"
                assert wanted in answer.json()["error"]["message"]
                assert answer.json()["error"]["param"] == "prompt"
                body = {"prompt": [5] * (16 * max_blocks)}
                assert api.post(URL, json=body, headers=headers).is_success
        for name in client_of(context).names():
            small.client.unpin(name)


def test_without_keys_the_pin_share_is_one(context: ApiContext) -> None:
    assert context.config.pin_share_of_key == 1.0


def test_without_keys_pins_belong_to_everyone(api: TestClient) -> None:
    made = pin(api, prompt=IDS, user="ann")["id"]
    assert api.get(f"{URL}/{made}").is_success
    assert api.delete(f"{URL}/{made}").is_success


# ---- disconnects and removals during computation -----------------------------------------------


def test_disconnect_during_computation_removes_the_pin(url: str, context: ApiContext) -> None:
    client = client_of(context)
    client.hold(after_steps=2)  # of five
    connection = open_connection(url, URL, {"prompt": LONG})
    wait_until(lambda: client.num_unfinished == 1)
    [computing] = httpx.get(url + URL).json()["data"]
    assert (computing["status"], computing["num_blocks"]) == ("computing", 0)
    hang_up(connection)
    wait_until(lambda: client.names() == [] and client.num_unfinished == 0)
    assert all(pool.num_used == 0 for pool in client.core.scheduler.memory.kv.pools)
    client.release()


def test_disconnect_before_the_response_removes_the_pin(url: str, context: ApiContext) -> None:
    client = client_of(context)
    client.answers.clear()
    connection = open_connection(url, URL, {"prompt": IDS})
    wait_until(lambda: client.num_calls == 1)
    assert len(client.names()) == 1
    hang_up(connection)
    wait_until(lambda: client.names() == [])


def test_deleting_a_pin_being_computed_fails_its_request(url: str, context: ApiContext) -> None:
    client = client_of(context)
    client.hold(after_steps=2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, url + URL, json={"prompt": LONG}, timeout=30)
        wait_until(lambda: client.num_unfinished == 1)
        [name] = client.names()
        assert httpx.delete(f"{url}{URL}/{name}").is_success
        client.release()
        found = answer.result(timeout=30)
    assert found.status_code == 400
    assert "was not pinned" in found.json()["error"]["message"]
    assert client.names() == []


def test_failed_prefix_is_an_error_and_not_pinned(url: str, context: ApiContext) -> None:
    client = client_of(context)
    client.hold(after_steps=2)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = json.dumps({"prompt": LONG})
    connection.request("POST", URL, body, {"Content-Type": "application/json"})
    wait_until(lambda: client.num_unfinished == 1)
    client.fail("token 7 made the step fail")
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert answer.status == 400
    assert "token 7 made the step fail" in error["message"]
    assert client.names() == []
    client.release()

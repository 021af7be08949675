"""The server"""

from typing import Any

import pytest

from quire.base.version import QUIRE_VERSION
from tests.support.serve.vllm_cases import ASK, Asked, differs


def test_version(asked: Asked) -> None:
    """/version tells it"""
    assert asked.get("/version").json() == {"version": QUIRE_VERSION}


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health(asked: Asked, path: str) -> None:
    """/health and /ping answer 200 without a body"""
    assert asked.get(path).content == b""


def test_ping_by_post(asked: Asked) -> None:
    """/ping may be a POST"""
    assert asked.http.post("/ping").status_code == 200


def test_load(asked: Asked) -> None:
    """/load counts what is being answered"""
    assert asked.get("/load").json() == {"server_load": 0}
    stream = asked.complete(stream=True, max_tokens=1900, ignore_eos=True)
    next(iter(stream))
    assert asked.get("/load").json() == {"server_load": 1}
    stream.close()


def test_models(asked: Asked) -> None:
    """/v1/models tells the served model, and its context"""
    [model] = asked.openai.models.list().data
    assert model.id == "demo" and model.object == "model"
    assert model.model_dump()["max_model_len"] == 2048
    assert asked.openai.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_model(asked: Asked, path: str) -> None:
    """a model that is not served is a 404"""
    error = asked.post(path, 404, model="other", prompt="Hi", messages=ASK)
    assert "other" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_model(asked: Asked, path: str) -> None:
    """without a model it is the served one"""
    body: dict[str, Any] = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": ASK}
    assert asked.post(path, max_tokens=1, **body)["model"] == "demo"


def test_content_type(asked: Asked) -> None:
    """a body that says it is a form is refused"""
    head = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = asked.http.post("/v1/chat/completions", content=b'{"messages": []}', headers=head)
    assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"]


def test_no_json(asked: Asked) -> None:
    """so is one that is no JSON"""
    head = {"Content-Type": "application/json"}
    answer = asked.http.post("/v1/completions", content=b"{", headers=head)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 405)])
def test_unknown_path(asked: Asked, path: str, status: int) -> None:
    """what there is not is a 404, another method a 405, in the errors' form"""
    assert asked.get(path, status).json()["error"]["code"]


def test_unknown_field(asked: Asked) -> None:
    """fields that nobody knows are taken"""
    answer = asked.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, "zz": 1})
    assert answer.status_code == 200 and answer.headers["x-quire-ignored-fields"] == "zz"


def test_request_id(asked: Asked) -> None:
    """X-Request-Id comes back"""
    head = {"X-Request-Id": "mine-1"}
    answer = asked.http.get("/v1/models", headers=head)
    assert answer.headers["x-request-id"] == "mine-1"


def test_metrics_count(asked: Asked) -> None:
    """/metrics counts tokens and requests"""
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")

    def counted() -> list[float]:
        lines = asked.get("/metrics").text.splitlines()
        return [
            sum(float(line.split()[-1]) for line in lines if line.startswith(f"quire:{name}"))
            for name in names
        ]

    before = counted()
    asked.complete([40, 41, 42], max_tokens=5, ignore_eos=True)
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [3, 5, 1]


SERIES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions_total",
    "time_to_first_token_seconds_sum", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_count", "e2e_request_latency_seconds_sum",
    "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
    "request_prompt_tokens_sum", "request_generation_tokens_sum",
    "request_params_n_sum", "request_params_max_tokens_sum", "iteration_tokens_total_sum",
    "cache_config_info",
)  # fmt: skip


@differs("the names begin with `quire:`")
@pytest.mark.parametrize("name", SERIES)
def test_series(asked: Asked, name: str) -> None:
    """names of the metrics"""
    asked.complete(n=2, temperature=1)
    assert f"\nquire:{name}" in asked.get("/metrics").text


def test_reset_prefix_cache(asked: Asked) -> None:
    """/reset_prefix_cache forgets prefixes"""
    ids = list(range(300, 380))
    asked.complete(ids)
    assert asked.http.post("/reset_prefix_cache").status_code == 200
    assert asked.complete(ids).usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("path", ["/invocations", "/pooling", "/v1/completions/render"])
@differs("501 with what to use instead, for `/invocations`, `/pooling` and rendering")
def test_not_here(asked: Asked, path: str) -> None:
    """other endpoints of vLLM"""
    assert "not supported: " in asked.post(path, 501, model="demo")["message"]

"""Sessions over HTTP: retained requests are forked, continued, rewound and released; errors;
ownership. A fresh request with the same tokens gives the same result."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MakeContext
from tests.support.processes.servers import wait_until

PROMPT = "Once upon a time there was a little fox. One day the fox"
SAMPLED = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(autouse=True)
def release_and_check_memory(api_context: ApiContext) -> Iterator[None]:
    yield
    core = api_context.client.engine.client.core  # type: ignore[attr-defined]
    for held in core.held():
        api_context.client.engine.client.keep(held.id, 0.0)  # type: ignore[attr-defined]
    core.scheduler.check_invariants()
    assert core.view().num_free_blocks == core.view().num_blocks


def post(api: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = api.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def retained(api: TestClient, **more: Any) -> tuple[str, list[int]]:
    """Make a retained request; return its id and the tokens that its client knows."""
    body = SAMPLED | {"prompt": PROMPT, "max_tokens": 20, "keep_s": 60} | more
    answer = post(api, "/v1/completions", **body)
    choice = answer["choices"][0]
    return answer["id"], choice["prompt_token_ids"] + choice["token_ids"]


def fresh(api: TestClient, token_ids: list[int], **more: Any) -> list[list[int]]:
    """Return the token ids that a fresh request with these tokens gets."""
    answer = post(api, "/v1/completions", prompt=token_ids, **(SAMPLED | more))
    return [choice["token_ids"] for choice in answer["choices"]]


def test_retained_request_has_the_tokens_its_client_knows(api: TestClient) -> None:
    name, tokens = retained(api)
    found = api.get(f"/v1/requests/{name}/tokens").json()
    assert found["token_ids"] == tokens and found["status"] == "held"
    assert found["num_tokens"] == len(tokens) and 0 < found["expires_in_s"] <= 60
    assert found["num_prompt_tokens"] == len(tokens) - 20 and found["num_blocks"] > 0
    every = {each["id"]: each for each in api.get("/v1/requests").json()["data"]}
    listed = every[name]
    assert listed["num_tokens"] == len(tokens) and "token_ids" not in listed
    assert listed["id"] == found["id"] == name, "the id that the client knows"


@pytest.mark.parametrize("at", [None, 1, 16, 20, -1])
def test_fork_matches_a_fresh_request_with_its_tokens(api: TestClient, at: int | None) -> None:
    name, tokens = retained(api)
    at = len(tokens) - 1 if at == -1 else at
    expected = fresh(api, tokens[:at], n=3, max_tokens=12, seed=7)
    body = SAMPLED | {"seed": 7, "n": 3, "max_tokens": 12}
    body |= {} if at is None else {"at_token": at}
    answer = post(api, f"/v1/requests/{name}/fork", **body)
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    at = at or len(tokens)
    assert answer["forked_from"] == {"id": name, "index": 0, "at_token": at}
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == at
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == at - 1, "all tokens but the last are shared"
    assert answer["choices"][0]["prompt_token_ids"] == tokens[:at]


def test_retained_fork_can_be_forked_again(api: TestClient) -> None:
    name, tokens = retained(api)
    one = post(api, f"/v1/requests/{name}/fork", **SAMPLED, n=2, max_tokens=5, keep_s=60)
    branch = tokens + one["choices"][1]["token_ids"]
    again = post(api, f"/v1/requests/{one['id']}/fork", **SAMPLED, index=1, max_tokens=8)
    assert again["choices"][0]["token_ids"] == fresh(api, branch, max_tokens=8)[0]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(branch) - 1


def test_fork_can_be_streamed(api: TestClient) -> None:
    name, tokens = retained(api)
    [expected] = fresh(api, tokens, max_tokens=6)
    body = SAMPLED | {"max_tokens": 6, "stream": True}
    with api.stream("POST", f"/v1/requests/{name}/fork", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert sum((chunk["choices"][0]["token_ids"] for chunk in chunks), []) == expected
    assert all(chunk["forked_from"]["at_token"] == len(tokens) for chunk in chunks)


@pytest.mark.parametrize("given", ["prompt", "token_ids"])
def test_append_continues_with_the_new_input(
    api: TestClient, given: str, api_context: ApiContext
) -> None:
    name, tokens = retained(api)
    tokenizer = api_context.renderer.tokenizer
    assert tokenizer is not None
    added = tokenizer.encode(" The bear said", False)
    [expected] = fresh(api, tokens + added, max_tokens=6)
    more = {"prompt": " The bear said", "token_ids": added}
    answer = post(
        api, f"/v1/requests/{name}/append", **SAMPLED, max_tokens=6, **{given: more[given]}
    )
    assert answer["choices"][0]["token_ids"] == expected
    assert api.get(f"/v1/requests/{name}/tokens").status_code == 404, "the new request replaced it"
    found = api.get(f"/v1/requests/{answer['id']}/tokens").json()
    assert found["token_ids"] == tokens + added + expected, "retained like its source"


def test_keep_source_retains_the_source(api: TestClient) -> None:
    name, tokens = retained(api)
    post(api, f"/v1/requests/{name}/append", prompt=" and", max_tokens=2, keep_source=True)
    assert api.get(f"/v1/requests/{name}/tokens").json()["token_ids"] == tokens


def test_append_after_rewind_matches_the_edited_tokens(api: TestClient) -> None:
    name, tokens = retained(api)
    for num in (3, len(tokens) - 10):  # the second cuts the prompt, too
        found = post(api, f"/v1/requests/{name}/rewind", num_tokens=num)
        tokens = tokens[:-num]
        assert found["num_tokens"] == len(tokens)
    [expected] = fresh(api, [*tokens, 40, 41], max_tokens=6)
    answer = post(api, f"/v1/requests/{name}/append", **SAMPLED, token_ids=[40, 41], max_tokens=6)
    assert answer["choices"][0]["token_ids"] == expected


def test_appended_messages_keep_the_sampled_tokens(
    api: TestClient, api_context: ApiContext
) -> None:
    """Retained tokens are not tokenised again. The template's text for the new messages follows
    them."""
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    body = {"temperature": 0, "max_tokens": 40, "keep_s": 60, "return_token_ids": True}
    first = post(api, "/v1/chat/completions", messages=messages, **body)
    name, choice = first["id"], first["choices"][0]
    held = api.get(f"/v1/requests/{name}/tokens").json()["token_ids"]
    more = [{"role": "user", "content": "And a bear?"}]
    answer = post(
        api, f"/v1/requests/{name}/append", messages=more, temperature=0, max_tokens=9,
        return_token_ids=True,
    )  # fmt: skip
    whole = answer["choices"][0]["prompt_token_ids"]
    assert whole[: len(held)] == held
    answered = {"role": "assistant", "content": choice["message"]["content"]}
    rendered = api_context.renderer.render_prompt([*messages, answered, *more])
    assert whole == rendered, "the demo's template renders a response unchanged"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(held) - 1


def test_running_request_can_be_forked_but_not_changed(
    api: TestClient, api_context: ApiContext
) -> None:
    client: Any = api_context.client
    client.hold(after_steps=8)
    ids: list[str] = []
    whole: list[Any] = []

    def run() -> None:
        whole.append(retained(api, max_tokens=30, seed=9))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: client._steps_left == 0)
        ids = [request.request_id for request in client.requests]
        found = api.get(f"/v1/requests/{ids[0]}/tokens").json()
        assert found["status"] == "live" and found["expires_in_s"] is None
        tokens = found["token_ids"]
        assert len(tokens) > found["num_prompt_tokens"]
        refused = post(api, f"/v1/requests/{ids[0]}/rewind", 409, num_tokens=1)
        assert refused["error"]["code"] == "request_is_live"
        post(api, f"/v1/requests/{ids[0]}/append", 409, prompt="x")
    finally:
        client.release()
    answer = post(api, f"/v1/requests/{ids[0]}/fork", **SAMPLED, at_token=len(tokens), max_tokens=6)
    thread.join()
    assert whole[0][1][: len(tokens)] == tokens
    assert answer["choices"][0]["token_ids"] == fresh(api, tokens, max_tokens=6)[0]


def test_deleted_request_is_not_found(api: TestClient) -> None:
    name, _ = retained(api)
    assert api.delete(f"/v1/requests/{name}").json()["deleted"] is True
    for answer in (api.delete(f"/v1/requests/{name}"), api.get(f"/v1/requests/{name}/tokens")):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert api.get("/v1/requests").json()["data"] == []


def test_keep_extends_the_retention(api: TestClient) -> None:
    name, _ = retained(api)
    found = post(api, f"/v1/requests/{name}/keep", keep_s=3000)
    assert 2990 < found["expires_in_s"] <= 3000
    post(api, f"/v1/requests/{name}/keep", 400, keep_s=0)


def test_unretained_requests_are_not_found(api: TestClient) -> None:
    for body in ({"keep_s": 0}, {}):
        answer = post(api, "/v1/completions", prompt=PROMPT, max_tokens=2, **body)
        error = post(api, f"/v1/requests/{answer['id']}/fork", 404)["error"]
        assert error["code"] == "not_found" and "keep_s" in error["message"]
    name, _ = retained(api)
    assert post(api, f"/v1/requests/{name}/fork", 404, index=1)["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("fork", {"at_token": 0}, "at_token"),
        ("fork", {"at_token": 10_000}, "at_token"),
        ("fork", {"prompt": "a", "token_ids": [1]}, "token_ids"),
        ("fork", {"token_ids": [-1]}, "token_ids"),
        ("fork", {"prompt": 7}, "prompt"),
        ("fork", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("fork", {"cache_salt": "other"}, "cache_salt"),
        ("fork", {"keep_s": -1}, "keep_s"),
        ("fork", {"keep_s": 1e9}, "keep_s"),
        ("fork", {"keep_s": 5, "best_of": 3, "n": 1}, "keep_s"),
        ("fork", {"keep_s": 5, "use_beam_search": True, "temperature": 0}, "keep_s"),
        ("append", {"n": 2}, "n"),
        ("rewind", {"num_tokens": 0}, "num_tokens"),
        ("rewind", {"num_tokens": 10_000}, "num_tokens"),
        ("rewind", {}, "num_tokens"),
    ],
)
def test_errors_name_the_wrong_field(
    api: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    name, tokens = retained(api)
    error = post(api, f"/v1/requests/{name}/{path}", 400, **body)["error"]
    assert error["param"] == param, error
    assert api.get(f"/v1/requests/{name}/tokens").json()["token_ids"] == tokens


def test_keep_s_needs_a_single_prompt_and_output(api: TestClient) -> None:
    body = {"prompt": [PROMPT, PROMPT], "keep_s": 5}
    assert post(api, "/v1/completions", 400, **body)["error"]["param"] == "keep_s"
    body = {"prompt": PROMPT, "keep_s": 5, "max_tokens": 0}
    assert post(api, "/v1/completions", 400, **body)["error"]["param"] == "keep_s"


def test_retained_tokens_end_at_the_stop_string(api: TestClient, api_context: ApiContext) -> None:
    """Not at the last token that the engine sampled."""
    answer = post(
        api, "/v1/completions", prompt=PROMPT, stop=["e"], max_tokens=60, keep_s=60,
        temperature=0, return_token_ids=True,
    )  # fmt: skip
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    held = api.get(f"/v1/requests/{answer['id']}/tokens").json()["token_ids"]
    assert held == choice["prompt_token_ids"] + choice["token_ids"]


def test_requests_of_other_keys_are_not_found(
    make_context: MakeContext, api_context: ApiContext
) -> None:
    context = make_context(api_key=("a", "b"))
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        mine, others = ({"Authorization": f"Bearer {key}"} for key in "ab")
        body = {"prompt": PROMPT, "max_tokens": 3, "keep_s": 60}
        name = client.post("/v1/completions", json=body, headers=mine).json()["id"]
        url = f"/v1/requests/{name}"
        for headers, status in ((others, 404), (mine, 200)):
            assert client.get(f"{url}/tokens", headers=headers).status_code == status
            for path, body in (
                ("fork", {"max_tokens": 1}), ("append", {"max_tokens": 1, "keep_source": True}),
                ("rewind", {"num_tokens": 1}), ("keep", {"keep_s": 9}),
            ):  # fmt: skip
                answer = client.post(f"{url}/{path}", json=body, headers=headers)
                assert answer.status_code == status, (path, answer.text)
            num = len(client.get("/v1/requests", headers=headers).json()["data"])
            assert num == (0 if status == 404 else 2)
            assert client.delete(url, headers=headers).status_code == status


def test_retained_requests_are_limited_per_key(
    make_context: MakeContext, api_context: ApiContext
) -> None:
    context = make_context(api_key=("a", "b"), pin_share=0.002)  # two sequences
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        body = {"prompt": PROMPT, "max_tokens": 1, "keep_s": 60}
        headers = {"Authorization": "Bearer a"}
        statuses = [
            client.post("/v1/completions", json=body, headers=headers).status_code for _ in range(3)
        ]
        assert statuses == [200, 200, 503]
        headers = {"Authorization": "Bearer b"}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200

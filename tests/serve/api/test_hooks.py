"""Hooks of a server over HTTP and WebSocket: the clients' responses and the engine's work.

Covers `serve/pipeline/hooked_prompt.py`.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from quire.base.requests.hooks import EndRequest, HookCall, HookPiece, HookRequest
from quire.render.templates.chat_template import ChatOptions
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import Hooks
from quire.serve.rollouts import tokens
from tests.serve.api.conftest import MakeContext
from tests.serve.api.test_chat_tools import QUESTION, TOOLS
from tests.serve.api.test_sse import hang_up, open_connection
from tests.support.processes.servers import wait_until
from tests.support.serve.direct_engine import direct, text_of, twin

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SAMPLED: dict[str, Any] = GREEDY | {"temperature": 1.2, "seed": 11, "n": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, **GREEDY}),
    (COMPLETIONS, {"prompt": "Once upon a time", **GREEDY}),
]
REASON = "a word of it may not be shown"
END = "content_filter"


class Prompts:
    """Refuses prompts with "forbidden", and replaces "war" with "story"."""

    def __init__(self) -> None:
        self.seen: list[HookRequest] = []

    def before_admission(self, request: HookRequest) -> HookRequest | None:
        self.seen.append(request)
        if any("forbidden" in text for text in request.texts):
            raise EndRequest("the prompt has a forbidden word")
        if request.messages is not None:
            changed = [
                {**message, "content": message["content"].replace("war", "story")}
                for message in request.messages
            ]
            return replace(request, messages=changed)
        if request.prompt is not None and "war" in request.prompt:
            return replace(request, prompt=request.prompt.replace("war", "story"))
        return None


class Ending:
    """Ends the request after `after` pieces of one choice; records the piece that it withholds."""

    def __init__(self, after: int, choice: int = 0) -> None:
        self.after, self.choice = after, choice
        self.withheld = ""

    async def on_output(self, piece: HookPiece) -> None:
        count = piece.context.state.get(piece.choice, 0)
        piece.context.state[piece.choice] = count + 1
        if piece.choice == self.choice and count >= self.after:
            self.withheld = piece.text
            raise EndRequest(REASON)


class Upper:
    def on_output(self, piece: HookPiece) -> HookPiece:
        return replace(piece, text=piece.text.upper())


class Failing:
    def __init__(self, after: int = 0, go: threading.Event | None = None) -> None:
        self.after, self.go, self.count = after, go, 0

    def on_output(self, piece: HookPiece) -> None:
        self.count += 1
        if self.count <= self.after:
            return
        if self.go is None:
            raise RuntimeError("a secret path")
        self.go.wait()


class CallFilter:
    def __init__(self) -> None:
        self.seen: list[HookCall] = []

    def on_tool_call(self, call: HookCall) -> HookCall:
        self.seen.append(call)
        if "Paris" in call.arguments and call.context.tenant:
            raise EndRequest("nobody asks for Paris")
        return replace(call, arguments='{"city": "Rome"}')


@pytest.fixture
def idle(api_context: ApiContext) -> Iterator[None]:
    """Check after the test that the engine has no requests and no used blocks."""
    yield
    scheduler = api_context.client.engine.client.core.scheduler
    wait_until(lambda: api_context.client.num_unfinished == 0)
    api_context.client.engine.client.core.step()
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert all(pool.num_used == 0 for pool in scheduler.memory.kv.pools), "blocks leak"
    scheduler.check_invariants()


pytestmark = pytest.mark.usefixtures("idle")


def use(context: ApiContext, *hooks: Any, timeout_s: float = 30.0) -> None:
    context.hooks = Hooks(hooks, timeout_s)


def post(api: TestClient, path: str, body: dict[str, Any]) -> Any:
    answer = api.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(api: TestClient, path: str, body: dict[str, Any]) -> tuple[list[Any], str]:
    """Return all chunks, and the raw text of the response."""
    answer = api.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    *events, done = [line[6:] for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events], answer.text


def shown(choice: Any) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


def text_by_index(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", [])):
        found[choice["index"]] = found.get(choice["index"], "") + shown(choice)
    return found


def last_by_index(chunks: list[Any]) -> dict[int, Any]:
    return {choice["index"]: choice for chunk in chunks for choice in chunk["choices"]}


# ---- before admission --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a forbidden thing"}]}),
        (CHAT, {"messages": MESSAGES, "documents": [{"text": "a forbidden thing"}]}),
        (COMPLETIONS, {"prompt": "a forbidden thing"}),
        (COMPLETIONS, {"prompt": ["fine", "a forbidden thing"]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_hook_refuses_a_prompt_with_400(
    api: TestClient, api_context: ApiContext, path: str, given: dict[str, Any], stream: bool
) -> None:
    use(api_context, Prompts())
    answer = api.post(path, json=given | {"stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "the prompt has a forbidden word",
        "type": "invalid_request_error", "param": None, "code": "content_filter",
    }  # fmt: skip
    assert api_context.client.num_generated == 0


def test_token_ids_do_not_bypass_the_prompt_hook(api: TestClient, api_context: ApiContext) -> None:
    use(api_context, Prompts())
    ids = twin().renderer.render("a forbidden thing").token_ids
    for prompt in (ids, [[5], ids]):
        answer = api.post(COMPLETIONS, json={"prompt": prompt, **GREEDY})
        assert answer.json()["error"]["code"] == "content_filter"
    bad_ids = [*ids, 1 << 20]  # truncation could remove the invalid token
    for prompt in (bad_ids, [bad_ids], [True, *ids], [-1]):
        body = {"prompt": prompt, "truncate_prompt_tokens": 3, "truncation_side": "right"}
        assert api.post(COMPLETIONS, json=body).json()["error"]["param"] == "prompt"
    assert api_context.client.num_generated == 0


def test_hook_replaces_the_prompt(api: TestClient, api_context: ApiContext) -> None:
    hook = Prompts()
    use(api_context, hook)
    war = [{"role": "user", "content": "Tell me a war."}]
    expected = direct(MESSAGES, max_tokens=24, ignore_eos=True)
    answer = post(api, CHAT, {"messages": war, **GREEDY})
    assert shown(answer["choices"][0]) == expected.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    text, ids = "A war of", twin().renderer.render("A war of").token_ids
    wanted = text_of("A story of", max_tokens=24, ignore_eos=True)
    for prompt in (text, ids):
        answer = post(api, COMPLETIONS, {"prompt": prompt, "echo": True, **GREEDY})
        assert shown(answer["choices"][0]) == "A story of" + wanted
    two = post(api, COMPLETIONS, {"prompt": ["Once", text], **GREEDY})["choices"]
    assert [shown(choice) for choice in two] == [
        text_of("Once", max_tokens=24, ignore_eos=True), wanted,
    ]  # fmt: skip
    assert hook.seen[2].prompt_token_ids == ids and hook.seen[2].prompt == text


def test_hook_receives_id_tenant_model_messages_and_params(make_context: MakeContext) -> None:
    context, hook = make_context(api_key=("a", "b")), Prompts()
    use(context, hook)
    body = {"messages": QUESTION, "tools": TOOLS, **SAMPLED}
    with TestClient(create_app(context)) as api:
        answer = api.post(CHAT, json=body, headers={"Authorization": "Bearer b"}).json()
    [seen] = hook.seen
    assert seen.context.request_id == answer["id"]
    assert (seen.context.tenant, seen.context.model) == ("key 2", "demo")
    assert seen.messages == QUESTION and seen.template == {"tools": TOOLS}
    assert seen.params == {name: body[name] for name in ("temperature", "max_tokens", "seed", "n")}


# ---- output ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), CASES)
def test_hook_replaces_pieces_of_the_text(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any]
) -> None:
    plain = post(api, path, body)["choices"][0]
    use(api_context, Upper())
    assert shown(post(api, path, body)["choices"][0]) == shown(plain).upper()
    chunks, _ = stream(api, path, body)
    assert text_by_index(chunks)[0] == shown(plain).upper()
    assert last_by_index(chunks)[0]["finish_reason"] == plain["finish_reason"]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_read_only_hook_leaves_the_response_unchanged(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any]
) -> None:
    logprobs: dict[str, Any] = {"logprobs": True} if path == CHAT else {"logprobs": 1}
    body = body | logprobs | {"return_token_ids": True}
    plain = post(api, path, body)
    use(api_context, Ending(1 << 20))
    assert post(api, path, body)["choices"] == plain["choices"]
    chunks, _ = stream(api, path, body)
    last = last_by_index(chunks)[0]
    assert last["token_ids"] == plain["choices"][0]["token_ids"]
    assert last["logprobs"] == plain["choices"][0]["logprobs"]


def test_changed_choice_omits_token_ids_and_experts(
    api: TestClient, api_context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both describe the original tokens, which the changed text no longer has."""
    monkeypatch.setattr(tokens, "weights_fields", lambda _: {"routed_experts": "an array"})
    ids = twin().renderer.render("Once upon a time").token_ids
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 8, "temperature": 0}}
    for hook, wanted in ((Ending(1 << 20), "an array"), (Upper(), None)):
        use(api_context, hook)
        [choice] = post(api, "/inference/v1/generate", body)["choices"]
        assert choice["routed_experts"] == wanted and bool(choice["token_ids"]) == bool(wanted)


@pytest.mark.parametrize(("path", "body"), CASES)
@pytest.mark.parametrize("after", [0, 3])
def test_hook_ends_a_stream(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any], after: int
) -> None:
    """The engine aborts the request, and the withheld text is never sent."""
    hook, client = Ending(after), api_context.client
    use(api_context, hook)
    logprobs: dict[str, Any] = {"logprobs": True} if path == CHAT else {"logprobs": 5}
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    chunks, sent = stream(api, path, body | {"max_tokens": 400} | logprobs | options)
    *_, end, usage = chunks
    [choice] = end["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (END, REASON)
    assert hook.withheld.strip() and json.dumps(hook.withheld)[1:-1] not in sent
    assert usage["usage"]["completion_tokens"] < 400 and usage["choices"] == []
    assert client.num_aborted == 1
    for given in (choice for chunk in chunks for choice in chunk["choices"]):
        assert given["logprobs"] is None and not given.get("token_ids")


@pytest.mark.parametrize(("path", "body"), CASES)
def test_hook_ends_one_of_two_choices(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any]
) -> None:
    """A stream ends with both choices. In a whole response the other choice is already complete."""
    use(api_context, Ending(4, choice=1))
    chunks, _ = stream(api, path, body | SAMPLED | {"max_tokens": 400})
    found = last_by_index(chunks)
    assert {each["finish_reason"] for each in found.values()} == {END} and len(found) == 2
    assert api_context.client.num_aborted == 1
    use(api_context, Ending(0, choice=1))
    first, second = post(api, path, body | SAMPLED)["choices"]
    assert first["finish_reason"] == "length" and shown(first)
    assert (second["finish_reason"], second["stop_reason"], shown(second)) == (END, REASON, "")


def test_hook_end_aborts_all_prompts_of_a_request(api: TestClient, api_context: ApiContext) -> None:
    use(api_context, Ending(4, choice=1))
    body = GREEDY | {"prompt": ["Once upon a time", "The cat", "Why"], "max_tokens": 400}
    chunks, _ = stream(api, COMPLETIONS, body)
    assert {each["finish_reason"] for each in last_by_index(chunks).values()} == {END}
    assert api_context.client.num_aborted == 3


def test_openai_client_reads_the_content_filter_finish(
    openai_client: openai.OpenAI, server_context: ApiContext
) -> None:
    use(server_context, Ending(3))
    try:
        chat_fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0}
        with openai_client.chat.completions.create(**chat_fields, stream=True) as chunks:
            *_, last = list(chunks)
        use(server_context, Ending(0))
        answer = openai_client.chat.completions.create(**chat_fields)
    finally:
        server_context.hooks = None
    for choice in (last.choices[0], answer.choices[0]):
        assert choice.finish_reason == END
        assert choice.model_extra == {"stop_reason": REASON}
    assert answer.choices[0].message.content == ""


# ---- tool calls --------------------------------------------------------------------------------


def calls_of(chunks: list[Any]) -> list[Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [call for choice in choices for call in choice["delta"].get("tool_calls", [])]


def test_hook_replaces_tool_call_arguments(api: TestClient, api_context: ApiContext) -> None:
    hook, body = CallFilter(), {"messages": QUESTION, "tools": TOOLS, "temperature": 0}
    use(api_context, hook)
    choice = post(api, CHAT, body)["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert choice["finish_reason"] == "tool_calls"
    chunks, sent = stream(api, CHAT, body | {"logprobs": True, "top_logprobs": 2})
    [call] = calls_of(chunks)
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert call["index"] == 0 and "Paris" not in sent
    assert last_by_index(chunks)[0]["finish_reason"] == "tool_calls"
    assert [json.loads(each.arguments) for each in hook.seen] == [{"city": "Paris"}] * 2
    assert hook.seen[0].name == "get_weather" and hook.seen[0].call_id.startswith("call_")


def test_hook_ends_the_request_at_a_tool_call(api: TestClient, api_context: ApiContext) -> None:
    use(api_context, CallFilter())
    body = {"messages": QUESTION, "tools": TOOLS, "temperature": 0, "user": "somebody"}
    choice = post(api, CHAT, body)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (END, "nobody asks for Paris")
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
    raw = direct(QUESTION, ChatOptions(tools=TOOLS), max_tokens=60).outputs[0].text
    assert "Paris" in raw
    chunks, sent = stream(api, CHAT, body)
    assert last_by_index(chunks)[0]["finish_reason"] == END
    assert not calls_of(chunks) and "Paris" not in sent.replace("nobody asks for Paris", "")


# ---- hooks that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), CASES)
def test_failing_output_hook_reports_500_without_details(
    api: TestClient, api_context: ApiContext, path: str, body: dict[str, Any]
) -> None:
    for streams in (False, True):
        use(api_context, Failing())
        answer = api.post(path, json=body | {"stream": streams})
        assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "hook_failed")
        assert "secret" not in answer.text
    use(api_context, Failing(after=3))
    chunks, sent = stream(api, path, body | {"max_tokens": 400})
    assert chunks[-1]["error"]["code"] == "hook_failed" and "secret" not in sent
    assert text_by_index(chunks[:-1])[0]
    api_context.hooks = None
    post(api, path, body)


def test_hanging_hooks_time_out_then_give_503_until_they_return(
    make_context: MakeContext, api_context: ApiContext
) -> None:
    go = threading.Event()
    hook = Failing(go=go)
    use(api_context, hook, timeout_s=0.2)
    with TestClient(create_app(api_context)) as api:
        answer = api.post(COMPLETIONS, json=CASES[1][1])
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "hook_timed_out")
        assert api.get("/health").status_code == 200
        hook.after = 1 << 20
        post(api, COMPLETIONS, CASES[1][1])
        hook.after = 0
        codes = [api.post(COMPLETIONS, json=CASES[1][1]).json()["error"]["code"] for _ in range(9)]
        assert codes == ["hook_timed_out"] * 7 + ["hook_unavailable"] * 2
        answer = api.post(COMPLETIONS, json=CASES[1][1])
        assert answer.status_code == 503 and answer.headers["retry-after"]
        go.set()
        wait_until(lambda: api.post(COMPLETIONS, json=CASES[1][1]).status_code == 200)


def test_failing_prompt_hook_reports_500_without_details(
    api: TestClient, api_context: ApiContext
) -> None:
    class Broken:
        def before_admission(self, request: HookRequest) -> None:
            raise RuntimeError("a secret path")

    use(api_context, Broken())
    for path, body in CASES:
        answer = api.post(path, json=body)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.json()["error"]["code"] == "hook_failed"
    assert api_context.client.num_generated == 0


# ---- open prompts ------------------------------------------------------------------------------


def send_in_pieces(api: TestClient, *pieces: Any, **fields: Any) -> list[Any]:
    with api.websocket_connect("/v1/stream") as line:
        line.send_json({"type": "start", **GREEDY, **fields})
        for piece in pieces:
            line.send_json({"type": "append", "prompt": piece})
        line.send_json({"type": "end"})
        found = [line.receive_json()]
        while found[-1]["type"] not in ("done", "error"):
            found.append(line.receive_json())
        return found


def test_hook_sees_an_open_prompt_as_one_text(api: TestClient, api_context: ApiContext) -> None:
    hook = Prompts()
    use(api_context, hook)
    ids = twin().renderer.render(" of").token_ids
    found = send_in_pieces(api, "A wa", "r", ids)
    wanted = text_of("A story of", max_tokens=24, ignore_eos=True)
    assert text_by_index(found[1:-1])[0] == wanted
    assert found[-2]["usage"]["prompt_tokens"] == len(
        twin().renderer.render("A story of").token_ids
    )
    [seen] = hook.seen
    assert seen.prompt == "A war of"
    error = send_in_pieces(api, "a forb", "idden thing")[-1]["error"]
    assert error["code"] == "content_filter"
    assert api_context.client.num_generated == 1
    assert text_by_index(send_in_pieces(api, "Once upon", " a time")[1:-1])[0] == text_of(
        "Once upon a time", max_tokens=24, ignore_eos=True
    )
    too_long = send_in_pieces(api, [5] * 300, [5] * 300)[-1]["error"]
    assert too_long["code"] == "context_length_exceeded"


def test_hooks_filter_the_answer_to_an_open_prompt(
    api: TestClient, api_context: ApiContext
) -> None:
    use(api_context, Upper())
    story = text_of("Once upon a time", max_tokens=24, ignore_eos=True)
    found = send_in_pieces(api, "Once upon", " a time")
    assert text_by_index(found[1:-1])[0] == story.upper()
    use(api_context, Ending(3))
    *_, end, usage, done = send_in_pieces(api, "Once upon", " a time", max_tokens=400)
    assert end["choices"][0]["finish_reason"] == END and done["type"] == "done"
    assert end["choices"][0]["stop_reason"] == REASON and usage["usage"]
    assert api_context.client.num_aborted == 1
    use(api_context, Failing(after=2))
    with api.websocket_connect("/v1/stream") as line:  # the connection stays open
        for _ in range(2):
            line.send_json({"type": "start", **GREEDY, "prompt": "Once", "last": True})
            found = [line.receive_json()]
            while found[-1]["type"] not in ("done", "error"):
                found.append(line.receive_json())
            assert found[-1]["error"]["code"] == "hook_failed"


# ---- concurrent requests -----------------------------------------------------------------------


def test_waiting_hook_blocks_no_other_request_and_its_client_may_leave(
    server_url: str, server_context: ApiContext
) -> None:
    """When the client disconnects, the engine aborts its request while the hook still runs."""
    go, inside, client = threading.Event(), threading.Event(), server_context.client

    class Waiting:
        def on_output(self, piece: HookPiece) -> None:
            if piece.context.model == "demo" and piece.context.tenant:
                inside.set()
                go.wait()

    use(server_context, Waiting())
    try:
        num_aborted = client.num_aborted
        body = CASES[1][1] | {"stream": True, "max_tokens": 400}
        connection = open_connection(server_url, COMPLETIONS, body | {"user": "waits"})
        assert inside.wait(30)
        other = open_connection(server_url, COMPLETIONS, body)
        assert other.getresponse().read().endswith(b"[DONE]\n\n")
        hang_up(connection)
        wait_until(lambda: client.num_aborted == num_aborted + 1)
        wait_until(lambda: client.num_unfinished == 0 and server_context.num_open == 0)
    finally:
        go.set()
        server_context.hooks = None

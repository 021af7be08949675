"""Images in the requests of all endpoints become the items of the engine's request.

Covers `serve/media/parts.py`.
"""

import base64
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.base.messages import Request
from quire.serve.context import ApiContext
from quire.serve.http.limits import BodyLimit
from quire.serve.media.parts import image_chars
from tests.serve.api.images.conftest import (
    MARK_ID,
    chat_part,
    data_url,
    file_of,
    picture,
    text_part,
)
from tests.support.serve.fake_client import FakeClient

SMALL, LARGE = file_of(picture()), file_of(picture(56, 84, 1))  # 1 and 6 tokens
JPEG = file_of(picture(28, 28, 2), "JPEG")
QUESTION = text_part("What is on it?")


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def last_request(context: ApiContext) -> Request:
    """Return the request that the engine got last."""
    client = context.client
    assert isinstance(client, FakeClient)
    return client.requests[-1]


def check_items(request: Request, sizes: list[int]) -> None:
    """Check the items' token counts, and that their spans are the prompt's placeholders."""
    assert [item.num_tokens for item in request.media] == sizes
    spans = [index for item in request.media for index in range(item.start, item.end)]
    ids = request.prompt_token_ids
    assert spans == [index for index, each in enumerate(ids) if each == MARK_ID]
    assert all(len(item.digest) == 32 and item.pixels for item in request.media)


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2} | fields


def test_chat_completions_take_images(seeing: TestClient, context: ApiContext) -> None:
    parts = [
        chat_part(data_url(SMALL), detail="low"), QUESTION,
        {"type": "image_url", "image_url": data_url(LARGE)},  # the form that vLLM accepts
        {"image_url": {"url": data_url(JPEG, "image/jpeg")}, "uuid": "u"},
    ]  # fmt: skip
    answer = seeing.post("/v1/chat/completions", json=chat(parts))
    assert answer.status_code == 200, answer.text
    check_items(last_request(context), [1, 6, 1])
    assert answer.json()["usage"]["prompt_tokens"] == len(last_request(context).prompt_token_ids)


def test_equal_images_have_equal_digests(seeing: TestClient, context: ApiContext) -> None:
    parts = [chat_part(data_url(data)) for data in (SMALL, JPEG, SMALL)]
    assert seeing.post("/v1/chat/completions", json=chat(parts)).status_code == 200
    first, second, third = (item.digest for item in last_request(context).media)
    assert first == third != second


def test_streamed_chat_takes_images(seeing: TestClient, context: ApiContext) -> None:
    body = chat([chat_part(data_url(LARGE)), QUESTION], stream=True)
    answer = seeing.post("/v1/chat/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    check_items(last_request(context), [6])


def test_trl_chat_takes_images(seeing: TestClient, context: ApiContext) -> None:
    """Its images count as image bytes, so that the body may be as large as that of a chat."""
    part = {"type": "image_pil", "image_pil": base64_of(LARGE)}
    body = {"messages": [[{"role": "user", "content": [part, QUESTION]}]], "max_tokens": 2}
    answer = seeing.post("/chat/", json=body)
    assert answer.status_code == 200, answer.text
    check_items(last_request(context), [6])
    assert image_chars(body) == len(base64_of(LARGE))
    limit = BodyLimit(seeing.app, context)
    scopes = [{"path": path, "method": "POST"} for path in ("/chat/", "/generate/")]
    sizes = context.config.max_bytes_with_images, context.config.max_body_bytes
    assert tuple(map(limit._max_bytes, scopes)) == sizes and sizes[0] > sizes[1]


def test_ollama_takes_images(seeing: TestClient, context: ApiContext) -> None:
    files = [base64_of(SMALL), base64_of(LARGE)]
    message = {"role": "user", "content": "What is on it?", "images": files}
    for path, fields in (
        ("/api/chat", {"messages": [message]}),
        ("/api/generate", {"prompt": "What is on it?", "images": files}),
    ):
        body = {"stream": False, "options": {"num_predict": 2}} | fields
        answer = seeing.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check_items(last_request(context), [1, 6])
        assert image_chars(body) == sum(map(len, files))
    assert "vision" in seeing.post("/api/show", json={}).json()["capabilities"]


def test_responses_take_images_in_messages_and_tool_outputs(
    seeing: TestClient, context: ApiContext
) -> None:
    image = {"type": "input_image", "image_url": data_url(LARGE), "detail": "high"}
    content = [image, {"type": "input_text", "text": "What is it?"}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [image | {"detail": "auto"}],
    }
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    first = seeing.post("/v1/responses", json=body)
    assert first.status_code == 200, first.text
    check_items(last_request(context), [6])
    body = {"input": [call, output], "previous_response_id": first.json()["id"]}
    second = seeing.post("/v1/responses", json=body | {"max_output_tokens": 2})
    assert second.status_code == 200, second.text
    check_items(last_request(context), [6, 6])
    items = seeing.get(f"/v1/responses/{first.json()['id']}/input_items").json()["data"]
    assert items[0]["content"] == [image, {"type": "input_text", "text": "What is it?"}]


def test_messages_take_images_in_content_and_tool_results(
    seeing: TestClient, context: ApiContext
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(LARGE)}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [image]}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}, image]},
    ]
    body = {"messages": messages, "max_tokens": 2}
    answer = seeing.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    check_items(last_request(context), [6, 6, 6])
    counted = seeing.post("/v1/messages/count_tokens", json={"messages": messages})
    assert counted.json() == {"input_tokens": len(last_request(context).prompt_token_ids)}


def test_tokenize_counts_image_tokens(seeing: TestClient) -> None:
    def count(content: Any, **fields: Any) -> int:
        found = seeing.post("/tokenize", json=chat(content) | fields).json()
        return int(found["count"])

    text = [QUESTION]
    assert count([*text, chat_part(data_url(LARGE))]) == count(text) + 6
    assert count([*text, chat_part(data_url(LARGE))], add_special_tokens=True) == count(text) + 6


def test_model_card_reports_vision(seeing: TestClient, api: TestClient) -> None:
    for client, expected in ((seeing, True), (api, False)):
        [card] = client.get("/v1/models").json()["data"]
        assert card["capabilities"] == {"vision": expected}


WRONG: list[tuple[Any, str, str]] = [
    ({"type": "image_pil", "image_pil": {}}, "type", "an object of Python"),
    ({"type": "image_embeds", "image_embeds": "x"}, "type", "encodes images itself"),
    ({"image_embeds": "x"}, "type", "encodes images itself"),
    ({"type": "audio_url", "audio_url": {"url": "u"}}, "type", "does not accept audio"),
    ({"type": "input_audio", "input_audio": {}}, "type", "does not accept audio"),
    ({"type": "video_url", "video_url": {"url": "u"}}, "type", "decodes no video files"),
    ({"type": "image"}, "type", "send an image as an image_url part"),
    ({"type": "file", "file": {"file_id": "f"}}, "type", "reads images only"),
    ({"type": "image_url"}, "image_url", "got None"),
    ({"type": "image_url", "image_url": {"url": 5}}, "image_url", "got 5"),
    ({"type": "image_url", "image_url": {"url": ""}}, "image_url", "got ''"),
    (chat_part("u", detail="extreme"), "detail", "got 'extreme'"),
    ({"type": "input_image", "file_id": "f"}, "file_id", "files are for batches"),
    ({"type": "input_image"}, "image_url", "must be a data: or https: URL, got None"),
    (chat_part("ftp://example.org/a.png"), "image_url", "must be a data: or an https: URL"),
    (chat_part("data:image/png,abc"), "image_url", "base64"),
    (chat_part("data:image/png;base64,@"), "image_url", "no valid base64"),
    (chat_part("data:image/png;base64,"), "image_url", "none of the formats"),
]


@pytest.mark.parametrize(("part", "field", "words"), WRONG)
def test_errors_name_the_wrong_part(seeing: TestClient, part: Any, field: str, words: str) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [QUESTION, part]}]
    error = seeing.post("/v1/chat/completions", json={"messages": messages}).json()["error"]
    assert error["param"] == f"messages[1].content[1].{field}"
    assert error["message"].startswith(error["param"]) and words in error["message"]


def test_unknown_part_is_refused_with_the_known_ones(seeing: TestClient) -> None:
    answer = seeing.post("/v1/chat/completions", json=chat([QUESTION, {"type": "picture"}]))
    message = answer.json()["error"]["message"]
    assert "'picture'" in message and "send text parts, and images as image_url parts" in message


def test_errors_use_the_field_names_of_each_endpoint(seeing: TestClient) -> None:
    broken = data_url(b"no image")
    content = [{"type": "input_image", "image_url": broken}]
    body = {"input": ["Hi", {"role": "user", "content": content}]}
    error = seeing.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "input[1].content[0].image_url"
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(b"no image")}
    block = {"type": "image", "source": source}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
    error = seeing.post("/v1/messages", json=body).json()["error"]
    assert error["message"].startswith("messages[0].content[0].source.data: ")
    block = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
    error = seeing.post("/v1/messages", json=body).json()["error"]
    assert error["message"].startswith("messages[0].content[0].source.type must be one of base64")


def test_model_without_a_vision_tower_refuses_images(api: TestClient) -> None:
    answer = api.post("/v1/chat/completions", json=chat([QUESTION, chat_part(data_url(SMALL))]))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url"
    assert "this model does not accept images; remove it" in error["message"]


def test_prompt_with_images_cannot_be_truncated(seeing: TestClient) -> None:
    body = chat([QUESTION, chat_part(data_url(SMALL))], truncate_prompt_tokens=3)
    error = seeing.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


def test_errors_do_not_repeat_image_content(seeing: TestClient) -> None:
    secret = base64_of(b"a secret picture" * 40)
    for url in (f"data:image/png;base64,{secret}", f"data:{secret}", secret, f"https://{secret}/"):
        answer = seeing.post("/v1/chat/completions", json=chat([chat_part(url)]))
        assert answer.status_code == 400
        assert len(answer.text) < 600
        assert secret[:64] not in json.dumps(answer.json())

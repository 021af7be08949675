"""Translation of Ollama's bodies into chat and completion requests, which then serve them."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from quire.serve.bodies.penalties import penalties_of
from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import ApiError, bad_request
from quire.serve.media.parts import ImagePart
from quire.serve.ollama.protocol import AnsweredBody, ChatBody, GenerateBody, Options

Json = dict[str, Any]

SAME = ("priority", "timeout_s", "cache_salt")
SAME_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "stop")
ANY_SEED = -1
FORMAT_NAME = "output"
# Template variables that turn reasoning on: for Qwen, GLM and others; for DeepSeek and Granite.
SWITCHES = ("enable_thinking", "thinking")


def chat_of(body: ChatBody) -> ChatCompletionRequest:
    """Return the chat request of a chat. Raises ApiError."""
    return _chat(body, chat_messages(body.messages or []), body.tools)


def generated_chat_of(body: GenerateBody) -> ChatCompletionRequest:
    """Return the chat request of a generation: its system message and its prompt. Raises
    ApiError."""
    message: Json = {"role": "user", "content": body.prompt or ""}
    if body.images:
        message["content"] = _with_images(message["content"], body.images, "images")
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(body, [*system, message])


def completion_of(body: GenerateBody) -> CompletionRequest:
    """Return the completion request of a generation without a template. Raises ApiError."""
    for name in ("images", "system", "think"):
        if getattr(body, name):
            raise bad_request(
                f"{name} needs the chat template, which raw and suffix do not use; remove one.",
                name,
            )
    fields = _common(body) | {"prompt": body.prompt or "", "suffix": body.suffix or None}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return CompletionRequest.model_construct(**fields)


def _chat(
    body: AnsweredBody, messages: list[Any], tools: list[Json] | None = None
) -> ChatCompletionRequest:
    fields = _common(body) | {"messages": messages}
    last = messages[-1] if messages and isinstance(messages[-1], Mapping) else {}
    if last.get("role") == "assistant" and not last.get("tool_calls"):
        fields["continue_final_message"] = True
    if tools:
        fields["tools"] = tools
    if body.logprobs is not None or body.top_logprobs is not None:
        fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if body.think is not None:
        fields["chat_template_kwargs"] = dict.fromkeys(SWITCHES, body.think is not False)
        fields["include_reasoning"] = body.think is not False
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    return ChatCompletionRequest.model_construct(**fields)


def _common(body: AnsweredBody) -> Json:
    """Return the fields that chats and completions share."""
    fields: Json = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    fields |= {"model": body.model, "stream": body.streams}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        form = {"name": FORMAT_NAME, "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields | (sampling_of(body.options) if body.options is not None else {})


def sampling_of(options: Options) -> Json:
    """Return the sampling fields of a chat or a completion. Raises ApiError for penalties of a part
    of the text."""
    fields: Json = {name: getattr(options, name) for name in SAME_OPTIONS}
    if options.seed != ANY_SEED:
        fields["seed"] = options.seed
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    fields |= penalties_of(options, "options.repeat_last_n")
    return {name: value for name, value in fields.items() if value is not None}


def chat_messages(messages: Sequence[Any]) -> list[Any]:
    """Return messages with image parts, and with ids that join calls to their results. Raises
    ApiError."""
    made: list[Any] = []
    open_ids: deque[str] = deque()  # of calls whose results have not come yet
    num_calls = 0
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            made.append(message)  # the renderer refuses it
            continue
        kept = {k: v for k, v in message.items() if k not in ("images", "tool_name")}
        if images := message.get("images"):
            where = f"messages[{index}].images"
            kept["content"] = _with_images(kept.get("content") or "", images, where)
        if isinstance(calls := message.get("tool_calls"), list):
            kept["tool_calls"] = [_call(call, num_calls + i) for i, call in enumerate(calls)]
            num_calls += len(calls)
            open_ids.extend(call["id"] for call in kept["tool_calls"] if "id" in call)
        if message.get("role") == "tool":
            if message.get("tool_name"):
                kept["name"] = message["tool_name"]
            if open_ids:
                kept.setdefault("tool_call_id", open_ids.popleft())
        made.append(kept)
    return made


def _call(call: Any, number: int) -> Json:
    """Return a call with an id, made of nine letters and digits for templates that want these."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad_request(f"tool_calls needs calls with a function, got {shown(call)}.", "messages")
    kept = {name: value for name, value in function.items() if name != "index"}
    return {"type": "function", "id": call.get("id") or f"call{number:05}", "function": kept}


def _with_images(content: Any, images: Any, where: str) -> list[Any]:
    if not isinstance(content, str):
        raise bad_request(f"content must be a text next to images, got {shown(content)}.", where)
    if not isinstance(images, list):
        raise bad_request(
            f"{where} must be a list of images in base64, got {shown(images)}.", where
        )
    parts: list[Any] = [{"type": "text", "text": content}] if content else []
    return parts + [_image(each, f"{where}[{i}]") for i, each in enumerate(images)]


def _image(data: Any, where: str) -> ImagePart:
    if not isinstance(data, str) or not data:
        raise wrong_image(data, where)
    return ImagePart(f"data:;base64,{data}", where)


def wrong_image(data: Any, where: str) -> ApiError:
    return bad_request(f"{where} must be an image in base64, got {shown(data)}.", where)

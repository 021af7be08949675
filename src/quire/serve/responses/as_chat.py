"""Translation of a response's body into a chat body, which the pipeline serves, and of the chat's
errors into the names of this API."""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.base.errors import EngineBusy, RequestError
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import ApiError, as_api_error, bad_request
from quire.serve.responses.body import ResponsesRequest
from quire.serve.responses.custom_tools import custom_function

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
# Values allowed in `include`. Only the first has an effect. The others concern tools and inputs
# that this server lacks, or encrypted reasoning, which it shows unencrypted.
INCLUDES = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
FORMATS = ("text", "json_object", "json_schema")
# Tokens per chunk for an answer that is not streamed
WHOLE_INTERVAL = 1 << 20
OWN = {"stream", "stream_options", "tools", "metadata", "store"}
SAME = (ResponsesRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()) - OWN
WORDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "truncate_prompt_tokens=-1": "truncation='auto'",
    "truncate_prompt_tokens": "truncation",
    "messages": "input",
}
WORD = re.compile("|".join(map(re.escape, WORDS)))


def chat_body(body: ResponsesRequest, messages: list[Json]) -> ChatCompletionRequest:
    """Return the chat body of a response; always a stream. Raises ApiError."""
    includes = _checked_includes(body)
    fields: Json = {
        name: getattr(body, name) for name in SAME if getattr(body, name, None) is not None
    }
    fields |= {"messages": messages, "stream": True, "tools": chat_tools(body.tools)}
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["logprobs"] = LOGPROBS in includes
    fields["top_logprobs"] = body.top_logprobs
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if not body.stream:
        fields["stream_interval"] = WHOLE_INTERVAL
    return ChatCompletionRequest.model_construct(**fields)


def chat_tools(tools: list[Json] | None) -> list[Json] | None:
    """Return a response's tools as functions of a chat; custom tools become functions, too. Raises
    ApiError for tools of other kinds."""
    if not tools:
        return None
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def in_own_words(error: RequestError | ApiError) -> ApiError | RequestError:
    """Return an error of the chat with this API's names of fields."""
    if isinstance(error, EngineBusy):
        return error
    api_error = as_api_error(error)
    if api_error.status == 400:
        api_error.message = WORD.sub(lambda found: WORDS[found[0]], api_error.message)
        if api_error.param is not None:
            api_error.param = WORD.sub(lambda found: WORDS[found[0]], api_error.param)
    return api_error


def _checked_includes(body: ResponsesRequest) -> list[str]:
    includes = body.include or []
    for each in includes:
        if each not in INCLUDES:
            known = ", ".join(INCLUDES)
            text = f"include may have {known}, got {shown(each)}; remove it."
            raise bad_request(text, "include")
    if body.top_logprobs and LOGPROBS not in includes:
        text = f"top_logprobs={body.top_logprobs} needs include={json.dumps([LOGPROBS])}; add it."
        raise bad_request(text, "top_logprobs")
    return includes


def _chat_tool(tool: Json, where: str) -> Json:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise bad_request(
            f"{where}.type must be function or custom: this server runs no tools itself. Remove"
            f" {shown(kind)}, or describe it as a function.",
            f"{where}.type",
            "unsupported_value",
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise bad_request(f"{where}.name is required, a text.", f"{where}.name")
    if kind == "custom":
        return {"type": "function", "function": custom_function(tool, where)}
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _response_format(given: Mapping[str, Any]) -> Json:
    kind = given.get("type")
    if kind not in FORMATS:
        raise bad_request(
            f"text.format.type must be one of {', '.join(FORMATS)}, got {shown(kind)}.",
            "text.format",
        )
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {k: v for k, v in given.items() if k != "type"}}

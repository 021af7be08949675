"""Translation of a Messages request into a chat completion request, which then serves it."""

from typing import Any

from quire.serve.anthropic.cache_control import hint_of
from quire.serve.anthropic.conversation import chat_messages, continues_last
from quire.serve.anthropic.protocol import (
    Conversing,
    MessagesRequest,
    OutputConfig,
    Thinking,
    ToolChoice,
)
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import bad_request

Json = dict[str, Any]

# Fields that a chat has with the same name and meaning.
SAME = (
    "temperature", "top_p", "top_k", "stream", "min_p", "repetition_penalty", "seed", "priority",
    "timeout_s", "cache_salt",
)  # fmt: skip
# Template variables that turn reasoning on: for Qwen, GLM and others; for DeepSeek and Granite.
SWITCHES = ("enable_thinking", "thinking")
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
FORMAT_NAME = "output"


def chat_of(body: Conversing) -> ChatCompletionRequest:
    """Return the chat request with the same prompt. Raises ApiError."""
    messages = chat_messages(body.system, body.messages)
    fields: Json = {"model": body.model, "messages": messages}
    if continues_last(messages):
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _of_choice(body.tool_choice, bool(body.tools))
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        variables = dict.fromkeys(SWITCHES, body.thinking.type != "disabled") | variables
    if variables:
        fields["chat_template_kwargs"] = variables
    if body.output_config is not None:
        fields |= _of_output(body.output_config)
    return ChatCompletionRequest.model_construct(**fields)


def answered_chat_of(body: MessagesRequest) -> ChatCompletionRequest:
    """Return the chat request with the same prompt and sampling fields. Raises ApiError."""
    fields: Json = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    fields["max_tokens"] = max(1, body.max_tokens)
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    if body.metadata is not None and body.metadata.user_id is not None:
        fields["user"] = body.metadata.user_id
    if body.thinking is not None:
        fields |= _of_thinking(body.thinking, body.max_tokens)
    chat = chat_of(body)
    return chat.model_copy(update=fields | hint_of(body, chat.messages))


def _tool(tool: Json, index: int) -> Json:
    where = f"tools[{index}]"
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if kind not in (None, "custom"):
        raise bad_request(
            f"{where}.type must be custom, got {shown(kind)}: the server runs no tools by itself;"
            " describe it by name and input_schema, and run it yourself.",
            where,
        )
    if not isinstance(name, str) or not name:
        raise bad_request(f"{where}.name must be a text that is not empty, got {shown(name)}.",
                          where)  # fmt: skip
    if not isinstance(schema, dict):
        raise bad_request(f"{where}.input_schema must be a JSON schema, got {shown(schema)}.",
                          where)  # fmt: skip
    description = tool.get("description")
    if not isinstance(description, str | None):
        raise bad_request(f"{where}.description must be a text, got {shown(description)}.", where)
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = schema
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _of_choice(choice: ToolChoice, has_tools: bool) -> Json:
    fields: Json = {}
    if choice.type == "tool":
        if not choice.name:
            raise bad_request(
                f"tool_choice.name must name the tool to call, got {shown(choice.name)}.",
                "tool_choice",
            )
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = CHOICES[choice.type]
    if choice.type in ("any", "tool") and not has_tools:
        raise bad_request(f"tool_choice.type={choice.type} needs tools; add them.", "tool_choice")
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _of_output(output: OutputConfig) -> Json:
    fields: Json = {}
    if output.effort is not None:
        fields["reasoning_effort"] = EFFORTS.get(output.effort, output.effort)
    if output.format is not None:
        form = {"name": FORMAT_NAME, "schema": output.format.json_schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields


def _of_thinking(thinking: Thinking, max_tokens: int) -> Json:
    """Return the fields that bound the reasoning; none if max_tokens bounds it anyway."""
    if thinking.type == "disabled":
        return {"include_reasoning": False}
    budget = thinking.budget_tokens
    if thinking.type == "adaptive":
        return {}
    if budget is None:
        raise bad_request(
            "thinking.budget_tokens is required with the type enabled; add it, or use adaptive.",
            "thinking",
        )
    if budget >= max_tokens:
        return {}
    return {"thinking_token_budget": budget}

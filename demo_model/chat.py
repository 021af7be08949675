"""The chat format in plain Python; it yields the same text as `chat_template.jinja`."""

from __future__ import annotations

import json
from typing import Any

from .item import Item, Message

START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


def signature(tool: dict[str, Any]) -> str:
    """Return the one line that presents a tool to the model."""
    function = tool["function"]
    required = function["parameters"].get("required", [])
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {schema['type']}"
        for name, schema in function["parameters"]["properties"].items()
    )
    return f"\n- {function['name']}({arguments}): {function['description']}"


def content_of(message: Message) -> str:
    """Return the text of a message, with its tool calls written out."""
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        body = f'{{"name": "{function["name"]}", "arguments": {arguments}}}'
        parts.append(CALL_OPEN + body + CALL_CLOSE)
    return "\n".join(parts)


def render(
    messages: list[Message], tools: list[dict[str, Any]] | None = None, prompt: bool = False
) -> str:
    """Return the conversation as text; `prompt` opens an assistant turn at the end."""
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    if tools:
        system += "\n\n" if system else ""
        system += "You can call these tools:" + "".join(map(signature, tools))
    text = f"{START}system\n{system}{END}\n" if system else ""
    for message in messages:
        text += f"{START}{message['role']}\n{content_of(message)}{END}\n"
    return text + (f"{START}assistant\n" if prompt else "")


def render_prompt(item: Item) -> str:
    """Return what the model is given for an item in the evaluation."""
    return render(item.messages[:-1], item.tools, prompt=True)

"""Tool tasks: call the fitting tool, read its result, and do not call when none fits."""

from __future__ import annotations

import json
import random
from typing import Any

from . import addition, questions, smalltalk, tool_families
from .item import Item, Message, assistant, user
from .tool_families import FAMILIES, Family
from .words import COLOURS, pick

Tool = dict[str, Any]
NO_TOOL = "I do not have a tool for that."
OPTIONAL = ("unit", "limit", "format", "note", "language_code", "units", "timezone", "count")


def offered(rng: random.Random, family: Family) -> Tool:
    """Return the OpenAI-style definition of one tool of the family."""
    names: list[str] = []
    for argument in family.arguments:
        free = [name for name in argument.names.split("|") if name not in names]
        names.append(rng.choice(free))
    properties = {
        name: {"type": argument.type, "description": name}
        for name, argument in zip(names, family.arguments, strict=True)
    }
    required = list(properties)
    if rng.random() < 0.2:
        extra = rng.choice(OPTIONAL)
        properties[extra] = {"type": "string", "description": extra}
    return {
        "type": "function",
        "function": {
            "name": rng.choice(family.names.split("|")),
            "description": rng.choice(family.about.split("|")),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def call_message(calls: list[tuple[str, dict[str, Any]]]) -> Message:
    """Return the assistant message that makes the calls."""
    tool_calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _families(rng: random.Random, count: int) -> list[Family]:
    """Return different families, about a third of them composed ones."""
    known = rng.sample(FAMILIES, count)
    return [tool_families.composed_family(rng) if rng.random() < 0.35 else f for f in known]


def _call(rng: random.Random, family: Family, tool: Tool) -> tuple[str, str, dict[str, Any]]:
    """Return a request that needs the tool, the tool's name and the arguments."""
    values = [argument.draw(rng) for argument in family.arguments]
    request = rng.choice(family.requests.split("|")).format(*values)
    function = tool["function"]
    arguments = dict(zip(function["parameters"]["required"], values, strict=True))
    return request, function["name"], arguments


def _result(rng: random.Random) -> tuple[str, str]:
    """Return the content of a tool result and the answer that reports it."""
    if rng.random() < 0.5:
        sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "cold", "warm"))
        text = rng.choice(
            (
                sky,
                f"{rng.randint(-9, 35)} degrees",
                f"{rng.randint(1, 9999)}",
                f"{sky}, {rng.randint(-9, 35)} degrees",
                "done",
                "ok",
                f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
                pick(rng, COLOURS, 0.5),
            )
        )
        return text, f"The tool says: {text}"
    values: dict[str, Any] = {
        "temperature": rng.randint(-9, 35),
        "sky": rng.choice(("sunny", "cloudy", "rainy")),
        "price": rng.randint(1, 999),
        "time": f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
        "result": rng.randint(1, 99999),
        "status": rng.choice(("ok", "done", "sent")),
        "colour": rng.choice(COLOURS),
        "name": pick(rng, COLOURS, 1.0),
    }
    keys = rng.sample(sorted(values), rng.randint(1, 3))
    content = json.dumps({key: values[key] for key in keys})
    return content, " ".join(f"The {key} is {values[key]}." for key in keys)


def calling(rng: random.Random) -> Item:
    """Return a request that needs one of the tools offered (sometimes two calls)."""
    families = _families(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    tools = [offered(rng, family) for family in families]
    request, name, arguments = _call(rng, families[0], tools[0])
    calls = [(name, arguments)]
    if len(arguments) == 1 and rng.random() < 0.08:
        second = _call(rng, families[0], tools[0])[2]
        if second != arguments and families[0] in FAMILIES:
            value, value2 = *arguments.values(), *second.values()
            request = request.replace(str(value), f"{value} and {value2}", 1)
            calls.append((name, second))
    messages = [user(request), call_message(calls)]
    key = request
    if rng.random() < 0.35:
        for _ in calls:
            messages.append({"role": "tool", "content": ""})
        results = [_result(rng) for _ in calls]
        for message, (content, _) in zip(messages[2:], results, strict=True):
            message["content"] = content
        messages.append(assistant("\n".join(answer for _, answer in results)))
        part = "result reported"
    else:
        part = "call needed" if len(calls) == 1 else "two calls needed"
    rng.shuffle(tools)
    return Item("tools", messages, key, tools=tools, part=part)


def lacking(rng: random.Random) -> Item:
    """Return a request for a tool that is not offered, with other tools or none."""
    families = list(rng.sample(FAMILIES, rng.choice((1, 2, 3, 4))))
    if families[0].names.startswith("add|"):
        families[0] = FAMILIES[0]
    target, others = families[0], [f for f in families[1:] if f is not families[0]]
    request = _call(rng, target, offered(rng, target))[0]
    tools = [offered(rng, family) for family in others]
    message = [user(request), assistant(NO_TOOL)]
    if request.startswith("How do you say"):
        message[-1] = assistant(smalltalk.UNKNOWN)
        tools = []
    return Item("tools", message, request, tools=tools, part="no fitting tool")


def needless(rng: random.Random) -> Item:
    """Return an item that needs no tool although tools are offered."""
    makers = (smalltalk.plain, questions.make, addition.make)
    item = rng.choice(makers)(rng)
    families = [f for f in _families(rng, rng.randint(1, 3)) if not f.names.startswith("add|")]
    tools = [offered(rng, family) for family in families or [FAMILIES[0]]]
    return Item(
        "tools", item.messages, item.key, tools=tools, check=item.check, part="tool not needed"
    )


def make(rng: random.Random) -> Item:
    """Return an item of kind `tools`."""
    return rng.choices((calling, lacking, needless), (65, 20, 15))[0](rng)

"""Render clients' conversations by quire and by transformers, for every template of a directory.

    python -m benchmarks.server.chat_templates DIRECTORY

The directory holds chat templates, one per file (*.jinja). transformers renders each conversation
in every equivalent form. Contents are text or parts, arguments of calls an object or text, and the
developer itself or the system. A good rendering contains all texts, and no list or object as Python
or JSON writes it. quire must give one of the good ones. If none is good, the template cannot show
the conversation. The exit status is 1 if quire differs.
"""

import argparse
import copy
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from quire.base.errors import RequestError
from quire.render.templates.chat_template import ChatOptions, ChatTemplate

Json = dict[str, Any]
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "A place"}},
                "required": ["place"],
            },
        },
    }
]
# Marks of a bad rendering: a list of parts, an object as Python writes it, or an object's text
# encoded again as JSON.
BAD = ("'type': 'text'", '"type": "text"', "'city'", '\\"city\\"', "'text': ")
USER: Json = {"role": "user", "content": "Question one?"}


def parts(*texts: str, kind: str = "text") -> list[Json]:
    return [{"type": kind, "text": text} for text in texts]


def calling(arguments: object, content: object = "", **more: Any) -> Json:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function, **more}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(content: object) -> Json:
    return {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": content}


@dataclass(frozen=True)
class Shape:
    """words: what must stand in a rendering. meant: messages that say the same in words that
    transformers takes, where a client's are others."""

    messages: list[Json]
    words: tuple[str, ...]
    meant: list[list[Json]] = field(default_factory=list)
    tools: list[Json] | None = None


TEXT = '{"city": "Cologne"}'
OBJECT = {"city": "Cologne"}
CUT = '{"city": "Colog'
NULLS = dict.fromkeys(("refusal", "audio", "function_call", "annotations", "reasoning_content"))
DONE = ("weather", "Cologne", "7 degrees")
ANSWER: Json = {"role": "assistant", "content": "Answer one."}
SYSTEM: Json = {"role": "system", "content": "Be brief."}
DEVELOPER: Json = {"role": "developer", "content": "Be kind."}
SHAPES: dict[str, Shape] = {
    "texts": Shape([USER, ANSWER, USER], ("Question one?", "Answer one.")),
    "system": Shape([SYSTEM, USER], ("Be brief.", "Question one?")),
    "parts of the user": Shape(
        [{"role": "user", "content": parts("Part one.", "Part two.")}], ("Part one.", "Part two.")
    ),
    "parts of the system": Shape(
        [{"role": "system", "content": parts("Part one.", "Part two.")}, USER],
        ("Part one.", "Part two.", "Question one?"),
    ),
    "parts of the assistant": Shape(
        [USER, {"role": "assistant", "content": parts("Part one.", "Part two.")}, USER],
        ("Part one.", "Part two."),
    ),
    "parts of a tool": Shape(
        [USER, calling(TEXT), result(parts("Part one.", "Part two."))],
        ("Part one.", "Part two."),
        tools=TOOLS,
    ),
    "input_text and output_text": Shape(
        [
            {"role": "user", "content": parts("Part one.", kind="input_text")},
            {"role": "assistant", "content": parts("Part two.", kind="output_text")},
            USER,
        ],
        ("Part one.", "Part two."),
        [
            [
                {"role": "user", "content": parts("Part one.")},
                {"role": "assistant", "content": parts("Part two.")},
                USER,
            ]
        ],
    ),
    "developer": Shape([DEVELOPER, USER], ("Be kind.", "Question one?")),
    "system and developer": Shape(
        [SYSTEM, DEVELOPER, USER],
        ("Be brief.", "Be kind.", "Question one?"),
        [[{"role": "system", "content": "Be brief.\n\nBe kind."}, USER]],
    ),
    "developer later": Shape(
        [SYSTEM, USER, ANSWER, DEVELOPER, USER], ("Be brief.", "Be kind.", "Answer one.")
    ),
    "reasoning": Shape(
        [USER, ANSWER | {"reasoning": "Thought one."}, USER],
        ("Question one?", "Answer one."),
        [[USER, ANSWER | dict.fromkeys(("reasoning", *names), "Thought one."), USER]
         for names in ((), ("reasoning_content",), ("reasoning_content", "thinking"))],
    ),
    "arguments as text": Shape([USER, calling(TEXT), result("7 degrees")], DONE, tools=TOOLS),
    "arguments as object": Shape([USER, calling(OBJECT), result("7 degrees")], DONE, tools=TOOLS),
    "call without content": Shape(
        [USER, calling(TEXT, None), result("7 degrees"), ANSWER, USER],
        (*DONE, "Answer one."),
        tools=TOOLS,
    ),
    "call beside a text": Shape(
        [USER, calling(TEXT, "I look."), result("7 degrees")], (*DONE, "I look."), tools=TOOLS
    ),
    "null arguments": Shape(
        [USER, calling(None), result("7 degrees")],
        ("weather", "7 degrees"),
        [[USER, calling({}), result("7 degrees")]],
        TOOLS,
    ),
    "arguments cut off": Shape(
        [USER, calling(CUT), USER],
        ("weather", "Colog"),
        [[USER, calling({"city": "Colog"}), USER], [USER, calling(CUT), USER]],
        TOOLS,
    ),
    "fields of OpenAI's client": Shape(
        [USER, ANSWER | NULLS | {"tool_calls": None}, USER, calling(TEXT, None, index=0) | NULLS,
         result("7 degrees")],
        (*DONE, "Answer one."),
        [[USER, ANSWER, USER, calling(TEXT, None, index=0), result("7 degrees")]],
        TOOLS,
    ),
    "two calls": Shape(
        [USER, calling(TEXT) | {"tool_calls": [
            *calling(TEXT)["tool_calls"], *calling('{"city": "Paris"}')["tool_calls"]]},
         result("7 degrees"), result("8 degrees")],
        (*DONE, "Paris", "8 degrees"),
        tools=TOOLS,
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="holds templates, one a file (*.jinja)")
    paths = sorted(parser.parse_args().directory.glob("*.jinja"))
    if not paths:
        parser.error("the directory holds no *.jinja")
    counts = {name: Counter[str]() for name in SHAPES}
    for path in paths:
        for name, verdict, detail in compared(path.read_text("utf-8")):
            counts[name][verdict] += 1
            if verdict != "same" and verdict != "no form":
                print(f"{path.stem}, {name}: {verdict}: {detail}")
    print(f"\n{len(paths)} templates; 'no form': the template cannot show such a conversation")
    for name, found in counts.items():
        print(f"{name:28}", *(f"{count:4} {verdict}" for verdict, count in sorted(found.items())))
    return int(any(set(found) - {"same", "no form"} for found in counts.values()))


def compared(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield for each shape its name, the verdict and a reason."""
    try:
        template = ChatTemplate(source, TOKENS)
    except RequestError as error:
        yield from ((name, "not compiled", str(error)) for name in SHAPES)
        return
    for name, shape in SHAPES.items():
        good = [text for text in renderings(source, shape) if is_good(text, shape)]
        try:
            ours = template.render(shape.messages, ChatOptions(tools=shape.tools))
        except RequestError as error:
            yield name, "refused" if good else "no form", str(error)
            continue
        if not good:
            yield name, "no form", ""
        else:
            yield name, "same" if ours in good else "differs", f"{ours!r}\n    {good[0]!r}"


def is_good(text: str, shape: Shape) -> bool:
    rest = text
    for tool in shape.tools or ():
        rest = rest.replace(json.dumps(tool), "")
    return all(word in text for word in shape.words) and not any(bad in rest for bad in BAD)


def renderings(source: str, shape: Shape) -> Iterator[str]:
    """Yield what transformers makes of each form of a conversation."""
    conversations = shape.meant or [shape.messages]
    for messages in itertools.chain.from_iterable(map(forms, conversations)):
        try:
            [text], _ = render_jinja_template(
                [messages],
                tools=shape.tools,
                chat_template=source,
                add_generation_prompt=True,
                **TOKENS,
            )
        except Exception:  # whatever a template raises
            continue
        yield text


def forms(messages: list[Json]) -> Iterator[list[Json]]:
    """Yield the conversation in each form: of each role's content, of arguments, of roles."""
    roles = sorted({message["role"] for message in messages})
    contents = itertools.product((as_text, as_part, as_parts, as_sent), repeat=len(roles))
    calls = (
        itertools.product((as_object, as_json), ("", None))
        if "tool_calls" in str(messages)
        else [(as_object, "")]
    )
    developers = ("developer", "system") if "developer" in roles else ("system",)
    for chosen, (formed, empty), role in itertools.product(contents, list(calls), developers):
        of_role = dict(zip(roles, chosen, strict=True))
        yield [
            in_form(message, of_role[message["role"]], formed, empty, role)
            for message in copy.deepcopy(messages)
        ]


def in_form(
    message: Json,
    content: Callable[[object], object],
    arguments: Callable[[Any], object],
    empty: str | None,
    developer: str,
) -> Json:
    if message["role"] == "developer":
        message["role"] = developer
    message["content"] = content(message["content"]) if message["content"] else empty
    for call in message.get("tool_calls", ()):
        given = call["function"]["arguments"]
        call["function"]["arguments"] = arguments(as_object(given))
    return message


def as_object(arguments: Any) -> Any:
    """Return arguments as an object; a text that is cut off stays as it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def as_text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_part(content: Any) -> list[Json]:
    return parts(as_text(content))


def as_parts(content: Any) -> Any:
    return parts(content) if isinstance(content, str) else content


def as_sent(content: Any) -> Any:
    return content


if __name__ == "__main__":
    sys.exit(main())

"""Data that describes how models write reasoning and calls. Detection, parser and grammar use it.

White space in these texts is white space that the model was trained to write. Grammars produce it;
the parser accepts any white space in its place, or none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that an answer may call."""

    name: str
    parameters: Mapping[str, Any] | None = None  # JSON schema of the arguments; None if it has none
    strict: bool = False  # whether optional calls must also follow the schema


@dataclass(frozen=True)
class ObjectBody:
    """A call is one JSON object. The grammar writes `arguments_keys[0]`; the parser reads all."""

    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    name_key: str = "name"


@dataclass(frozen=True)
class NamedBody:
    """A call is an unquoted name followed by a JSON object of arguments."""

    after_name: str = ""


@dataclass(frozen=True)
class ParametersBody:
    """A call is an unquoted name, followed by each argument between marks.

    Arguments of type string are unquoted; other arguments are JSON."""

    after_name: str
    open: str
    after_key: str  # mark between an argument's name and its value
    close: str


@dataclass(frozen=True)
class CodeBody:
    """A call is code up to the end of the answer. Grammars do not write such calls.

    The code becomes the first parameter of the first of these tools that the request has."""

    tools: tuple[str, ...]


Body = ObjectBody | NamedBody | ParametersBody | CodeBody


@dataclass(frozen=True)
class CallSyntax:
    """The calls of an answer: begin open BODY close (between open BODY close)* end.

    Without `begin` and `open` the answer must begin with a call of a known tool."""

    body: Body
    begin: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    end: str = ""

    @property
    def is_bare(self) -> bool:
        return not (self.begin or self.open)


@dataclass(frozen=True)
class CallFormat:
    """A model family's way of writing calls."""

    names: tuple[str, ...]  # vLLM's names of the parser
    marks: tuple[tuple[str, ...], ...]  # a template with all marks of one group has this format
    syntaxes: tuple[CallSyntax, ...]  # the grammar writes the first; the parser reads all
    id_chars: int = 0  # length of a call's id if the template demands one, else 0
    several: bool = True  # whether an answer may contain more than one call
    ends_the_answer: bool = False  # whether a call's closing mark is also an end token


@dataclass(frozen=True)
class ReasoningFormat:
    """A model family's way of writing reasoning."""

    names: tuple[str, ...]  # vLLM's names of the parser
    marks: tuple[tuple[str, ...], ...]  # a template with all marks of one group has this format
    open: str
    close: str
    after: str = "\n\n"  # text that models write after `close`
    content_open: str = ""  # mark before the content
    silent: tuple[str, ...] = field(default=())  # marks that belong to no part of the answer


def openers(calls: CallFormat | None) -> dict[str, list[CallSyntax]]:
    """Return the words that open calls, each with the syntaxes to try in order."""
    found: dict[str, list[CallSyntax]] = {}
    for syntax in calls.syntaxes if calls is not None else ():
        for word in dict.fromkeys(
            (*(syntax.begin + syntax.open).split()[:1], *syntax.open.split()[:1])
        ):
            found.setdefault(word, []).append(syntax)
    return found


def content_marks(calls: CallFormat | None, reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    """Return the marks that end a piece of content."""
    found = [*openers(calls)]
    if reasoning is not None:
        found += [reasoning.open, reasoning.close, reasoning.content_open, *reasoning.silent]
    return tuple(dict.fromkeys(filter(None, found)))


def reasoning_marks(reasoning: ReasoningFormat) -> tuple[str, ...]:
    """Return the marks that end reasoning."""
    return tuple(filter(None, (reasoning.close, reasoning.content_open)))

"""How a model writes reasoning and calls, as data: detection, parser and grammar all read it.

White space in these texts is what the model was trained to write, and what grammars demand;
the parser takes any white space there, or none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that an answer may call. parameters: the JSON schema of its arguments; None: it
    takes none. strict: calls must follow the schema also where they are not forced."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True)
class ObjectBody:
    """A call is one JSON object. The grammar writes `arguments_keys[0]`; the parser reads all."""

    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    name_key: str = "name"


@dataclass(frozen=True)
class NamedBody:
    """The name stands in the text, the arguments behind it as a JSON object."""

    after_name: str = ""


@dataclass(frozen=True)
class ParametersBody:
    """The name stands in the text, and behind it each argument between marks of its own.

    Arguments that the schema calls strings stand there as they are, others as JSON. after_key:
    between an argument's name and its value.
    """

    after_name: str
    open: str
    after_key: str
    close: str


@dataclass(frozen=True)
class CodeBody:
    """What follows is the code for a tool of one of these names, up to the end of the answer.

    It is the tool's first parameter. Grammars do not write it.
    """

    tools: tuple[str, ...]


Body = ObjectBody | NamedBody | ParametersBody | CodeBody


@dataclass(frozen=True)
class CallSyntax:
    """The calls of an answer: begin open BODY close (between open BODY close)* end.

    Without `begin` and `open` the answer must begin with a call of a known tool.
    """

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
    """names: vLLM's names of the parser. marks: what tells a chat template's text: all of one of
    these groups. syntaxes: the first is what grammars write, the parser reads all. id_chars: length
    of a call's id, where the template insists on one. several: whether an answer can have more
    than one call. ends_the_answer: the closing mark of a call is an end token, too."""

    names: tuple[str, ...]
    marks: tuple[tuple[str, ...], ...]
    syntaxes: tuple[CallSyntax, ...]
    id_chars: int = 0
    several: bool = True
    ends_the_answer: bool = False


@dataclass(frozen=True)
class ReasoningFormat:
    """names, marks: as of calls. content_open: what stands before the content. silent: marks that
    structure an answer and belong to no part of it. after: what models write behind `close`."""

    names: tuple[str, ...]
    marks: tuple[tuple[str, ...], ...]
    open: str
    close: str
    after: str = "\n\n"
    content_open: str = ""
    silent: tuple[str, ...] = field(default=())


def openers(calls: CallFormat | None) -> dict[str, list[CallSyntax]]:
    """Return the words that open calls, and what each may open, in order."""
    found: dict[str, list[CallSyntax]] = {}
    for syntax in calls.syntaxes if calls is not None else ():
        for word in dict.fromkeys(
            (*(syntax.begin + syntax.open).split()[:1], *syntax.open.split()[:1])
        ):
            found.setdefault(word, []).append(syntax)
    return found


def content_marks(calls: CallFormat | None, reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    """Return the words that mean something where content stands."""
    found = [*openers(calls)]
    if reasoning is not None:
        found += [reasoning.open, reasoning.close, reasoning.content_open, *reasoning.silent]
    return tuple(dict.fromkeys(filter(None, found)))


def reasoning_marks(reasoning: ReasoningFormat) -> tuple[str, ...]:
    """Return the words that end reasoning."""
    return tuple(filter(None, (reasoning.close, reasoning.content_open)))

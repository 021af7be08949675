"""The parts of an answer, in the order in which the model wrote them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegun:
    """The start of a call."""

    index: int  # number of the call in the answer, from 0
    name: str
    id: str  # random id in the form that the model's template accepts


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments. A call's pieces join to the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    index: int


Part = Content | Reasoning | CallBegun | CallArguments | CallEnded


def joined(parts: list[Part]) -> list[Part]:
    """Join neighbouring parts of one kind, and drop empty ones."""
    found: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, CallBegun | CallEnded):
            _close(found, texts)
            found.append(part)
            continue
        if not part.text:
            continue
        if not (texts and _continues(found[-1], part)):
            _close(found, texts)
            found.append(part)
        texts.append(part.text)
    _close(found, texts)
    return found


def _continues(last: Part, part: Part) -> bool:
    if isinstance(last, CallArguments) and isinstance(part, CallArguments):
        return last.index == part.index
    return type(last) is type(part)


def _close(found: list[Part], texts: list[str]) -> None:
    """Give the last part the joined text of the parts merged into it."""
    if len(texts) > 1:
        last, text = found[-1], "".join(texts)
        if isinstance(last, CallArguments):
            found[-1] = CallArguments(last.index, text)
        elif isinstance(last, Content):
            found[-1] = Content(text)
        elif isinstance(last, Reasoning):
            found[-1] = Reasoning(text)
    texts.clear()

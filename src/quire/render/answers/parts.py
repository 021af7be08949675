"""What an answer consists of, in the order in which the model wrote it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegun:
    """index: of the call in the answer, from 0. id: random, as the model's template takes it."""

    index: int
    name: str
    id: str


@dataclass(frozen=True)
class CallArguments:
    """text: the next piece of a JSON object, which begins with the call."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    index: int


Part = Content | Reasoning | CallBegun | CallArguments | CallEnded


def joined(parts: list[Part]) -> list[Part]:
    """Join neighbours that go on in one text."""
    found: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, CallBegun | CallEnded):
            _close(found, texts)
            found.append(part)
            continue
        if not part.text:
            continue
        if not (texts and _goes_on(found[-1], part)):
            _close(found, texts)
            found.append(part)
        texts.append(part.text)
    _close(found, texts)
    return found


def _goes_on(last: Part, part: Part) -> bool:
    if isinstance(last, CallArguments) and isinstance(part, CallArguments):
        return last.index == part.index
    return type(last) is type(part)


def _close(found: list[Part], texts: list[str]) -> None:
    """Give the last part the text of all that it was joined with."""
    if len(texts) > 1:
        last, text = found[-1], "".join(texts)
        if isinstance(last, CallArguments):
            found[-1] = CallArguments(last.index, text)
        elif isinstance(last, Content):
            found[-1] = Content(text)
        elif isinstance(last, Reasoning):
            found[-1] = Reasoning(text)
    texts.clear()

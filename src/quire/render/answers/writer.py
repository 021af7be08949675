"""Collects the parts of an answer and drops white space at the ends of their texts."""

import random
import string
import uuid

from quire.render.answers.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
    joined,
)


class Writer:
    """Collects parts, and numbers the calls.

    White space before content is dropped if reasoning or a call precedes the content. White space
    after content is dropped if the answer has a call. An answer of content only stays unchanged.

    id_chars: length of a call's id in letters and digits; 0 for any unique id."""

    def __init__(self, id_chars: int = 0) -> None:
        self.num_calls = 0
        self._id_chars = id_chars
        self._parts: list[Part] = []
        self._space: list[str] = []  # white space at the end of the content so far
        self._reasoning_space: list[str] = []
        self._has_content = False
        self._has_reasoning = False  # whether any reasoning has text
        self._had_reasoning = False

    @property
    def has_content(self) -> bool:
        """Whether the content has more than white space so far."""
        return self._has_content

    def taken(self) -> list[Part]:
        """Return the parts since the last call, and remove them."""
        parts, self._parts = self._parts, []
        return joined(parts)

    def content(self, text: str) -> None:
        solid = text.rstrip()
        if solid:
            new = "".join(self._space) + solid
            if not self._has_content and (self.num_calls or self._had_reasoning):
                new = new.lstrip()
            self._parts.append(Content(new))
            self._space = []
            self._has_content = True
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def reasoning(self, text: str) -> None:
        solid = text.rstrip()
        if solid:
            new = "".join(self._reasoning_space) + solid
            self._parts.append(Reasoning(new if self._has_reasoning else new.lstrip()))
            self._reasoning_space = []
            self._has_reasoning = True
        if len(solid) < len(text):
            self._reasoning_space.append(text[len(solid) :])

    def begin_reasoning(self) -> None:
        """Begin a block of reasoning; an empty line separates it from an earlier block."""
        self._reasoning_space = ["\n\n"] if self._has_reasoning else []
        self._had_reasoning = True

    def begin_call(self, name: str) -> None:
        name = name.encode("utf-8", "replace").decode()
        self._parts.append(CallBegun(self.num_calls, name, self._new_id()))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._parts.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        self._parts.append(CallEnded(self.num_calls - 1))

    def end(self) -> None:
        """End the answer; white space at its end stays if the answer has no calls."""
        if not self.num_calls and self._space:
            self._parts.append(Content("".join(self._space)))
            self._space = []

    def _new_id(self) -> str:
        if not self._id_chars:
            return f"call_{uuid.uuid4().hex}"
        chance = random.SystemRandom()
        return "".join(chance.choices(string.ascii_letters + string.digits, k=self._id_chars))

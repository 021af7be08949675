"""One item of a response while it is written: its events from `added` to `done`."""

from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]

PREFIXES: dict[Kind, str] = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc",
}  # fmt: skip
EVENTS: dict[Kind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
# Items that are calls, and the field that has their text.
CALLS: dict[Kind, str] = {"function_call": "arguments", "custom_tool_call": "input"}


@dataclass
class OutputItem:
    """index: its place in the output. call: name and id of a call; empty for other items.
    logprobs: of a message's tokens so far."""

    kind: Kind
    id: str
    index: int
    call: Json = field(default_factory=dict)
    logprobs: list[Json] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> list[Json]:
        """Return the events before its first text."""
        item = self._item("in_progress", [])
        found = [self._event("response.output_item.added", item=item)]
        if self.kind not in CALLS:
            part = self._part("", [])
            found.append(self._about("response.content_part.added", part=part))
        return found

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        """Return the event of more text."""
        self._texts.append(text)
        self.logprobs += logprobs
        beside: Json = {"logprobs": logprobs} if self.kind == "message" else {}
        return [self._about(f"{EVENTS[self.kind]}.delta", delta=text, **beside)]

    def end(self, status: str) -> tuple[Json, list[Json]]:
        """Return the whole item, and the events behind its last text."""
        part, done = self._part(self.text, self.logprobs), f"{EVENTS[self.kind]}.done"
        item = self._item(status, [part])
        found = []
        if self.kind in CALLS:
            name: Json = {"name": self.call["name"]} if self.kind == "function_call" else {}
            found.append(self._about(done, **{CALLS[self.kind]: self.text}, **name))
        else:
            beside: Json = {"logprobs": self.logprobs} if self.kind == "message" else {}
            found.append(self._about(done, text=self.text, **beside))
            found.append(self._about("response.content_part.done", part=part))
        found.append(self._event("response.output_item.done", item=item))
        return item, found

    def _item(self, status: str, content: list[Json]) -> Json:
        head: Json = {"type": self.kind, "id": self.id, "status": status}
        if self.kind in CALLS:
            return head | self.call | {CALLS[self.kind]: self.text}
        if self.kind == "reasoning":
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _about(self, kind: str, **fields: Any) -> Json:
        """Return an event about the item's text."""
        place: Json = {} if self.kind in CALLS else {"content_index": 0}
        return self._event(kind, item_id=self.id, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "output_index": self.index, **fields}

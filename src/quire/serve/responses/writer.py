"""`ResponseWriter`: converts chunks of a chat to events of the Responses API, and builds the
response.

An item ends where the next one begins. So at most one is open, with events from `added` to `done`.
Events are numbered from 0. The caller must encode each before it requests the next, because events
share the response.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.serve.responses.custom_tools import InputText

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
# Items that are calls, and the field with their text
CALLS: dict[Kind, str] = {"function_call": "arguments", "custom_tool_call": "input"}


@dataclass
class OutputItem:
    """An item of the output."""

    kind: Kind
    id: str
    index: int  # position in the output
    call: Json = field(default_factory=dict)  # name and id of a call; empty for other items
    logprobs: list[Json] = field(default_factory=list)  # of a message's tokens so far
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> list[Json]:
        """Return the events before the item's first text."""
        item = self._item("in_progress", [])
        found = [self._event("response.output_item.added", item=item)]
        if self.kind not in CALLS:
            part = self._part("", [])
            found.append(self._about("response.content_part.added", part=part))
        return found

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        """Return the event of a text delta."""
        self._texts.append(text)
        self.logprobs += logprobs
        logprob_fields: Json = {"logprobs": logprobs} if self.kind == "message" else {}
        return [self._about(f"{EVENTS[self.kind]}.delta", delta=text, **logprob_fields)]

    def end(self, status: str) -> tuple[Json, list[Json]]:
        """Return the complete item, and the events after its last text."""
        part, done = self._part(self.text, self.logprobs), f"{EVENTS[self.kind]}.done"
        item = self._item(status, [part])
        found = []
        if self.kind in CALLS:
            name: Json = {"name": self.call["name"]} if self.kind == "function_call" else {}
            found.append(self._about(done, **{CALLS[self.kind]: self.text}, **name))
        else:
            logprob_fields: Json = {"logprobs": self.logprobs} if self.kind == "message" else {}
            found.append(self._about(done, text=self.text, **logprob_fields))
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
        """Return an event on the item's text."""
        index_field: Json = {} if self.kind in CALLS else {"content_index": 0}
        return self._event(kind, item_id=self.id, **index_field, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "output_index": self.index, **fields}


LAST = {
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # the API lacks an event for this
}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
CANCELLED = "abort"


class ResponseWriter:
    """Converter of one response's chunks. response: the response without output. new_id: returns an
    id for a kind of items. num_reasoning: returns the number of reasoning tokens so far. is_queued:
    whether the response runs in the background, so its start is an event. custom: names of custom
    tools."""

    def __init__(
        self,
        response: Json,
        new_id: Callable[[str], str],
        num_reasoning: Callable[[], int],
        is_queued: bool = False,
        custom: Collection[str] = (),
    ) -> None:
        self.response = response | {"status": "queued" if is_queued else "in_progress"}
        self.response["output"] = []
        self._new_id = new_id
        self._num_reasoning = num_reasoning
        self._custom = custom
        self._item: OutputItem | None = None
        self._input: InputText | None = None  # of the open item, if it calls a custom tool
        self._reason = "stop"
        self._num_events = 0
        self._num_seen = 0  # tokens with logprobs
        self._logprobs: list[Json] = []  # of message tokens whose text is still held back

    @property
    def is_over(self) -> bool:
        return self.response["status"] in LAST

    def begin(self) -> list[Json]:
        """Return the first events."""
        return self._numbered(
            [self._response_event("created"), self._response_event(self.response["status"])]
        )

    def take(self, choice: Json) -> list[Json]:
        """Return the events of one choice of a chunk."""
        delta = choice["delta"]
        self._take_logprobs(choice)
        found: list[Json] = []
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            found.append(self._response_event("in_progress"))
        if text := delta.get("reasoning"):
            found += self._write("reasoning", text)
        if text := delta.get("content"):
            found += self._write("message", text)
        for call in delta.get("tool_calls") or ():
            found += self._write_call(call)
        self._reason = choice["finish_reason"] or self._reason
        return self._numbered(found)

    def end(self, usage: Json, completed_s: int) -> list[Json]:
        """Return the last events of an answer that has ended."""
        found: list[Json] = []
        if self._item is None and not self.response["output"]:
            found += self._open("message")  # an empty answer is an empty message
        status = "completed"
        if self._reason in INCOMPLETE:
            status = "incomplete"
            self.response["incomplete_details"] = {"reason": INCOMPLETE[self._reason]}
        elif self._reason == CANCELLED:
            status = "cancelled"
        found += self._close("completed" if status == "completed" else "incomplete")
        if status == "completed":
            self.response["completed_at"] = completed_s
        self.response |= {"status": status, "usage": usage}
        return self._numbered([*found, self._last()])

    def stop(self, status: str, error: Json | None = None) -> list[Json]:
        """Return the last event of a response that ends early. status: failed or cancelled."""
        if self._item is not None:
            self._close("incomplete")
        self.response |= {"status": status, "error": error}
        return self._numbered([self._last()])

    def _write(self, kind: Kind, text: str) -> list[Json]:
        found: list[Json] = []
        if self._item is None or self._item.kind != kind:
            found += self._close("completed") + self._open(kind)
        assert self._item is not None
        logprobs = self._logprobs if kind == "message" else []
        self._logprobs = []
        return found + self._item.add(text, logprobs)

    def _write_call(self, call: Json) -> list[Json]:
        found: list[Json] = []
        function = call["function"]
        if call.get("id"):
            named = {"call_id": call["id"], "name": function["name"]}
            is_custom = function["name"] in self._custom
            kind: Kind = "custom_tool_call" if is_custom else "function_call"
            found += self._close("completed") + self._open(kind, named)
            self._input = InputText() if is_custom else None
        assert self._item is not None
        text = function.get("arguments")
        if text and self._input is not None:
            text = self._input.add(text)
        return found + self._item.add(text, []) if text else found

    def _open(self, kind: Kind, call: Json | None = None) -> list[Json]:
        item_id, index = self._new_id(PREFIXES[kind]), len(self.response["output"])
        self._item = OutputItem(kind, item_id, index, call or {})
        return self._item.begin()

    def _close(self, status: str) -> list[Json]:
        if self._item is None:
            return []
        rest = "" if self._input is None else self._input.end()
        found = self._item.add(rest, []) if rest else []
        item, ended = self._item.end(status)
        self.response["output"] = [*self.response["output"], item]
        self._item = self._input = None
        return found + ended

    def _take_logprobs(self, choice: Json) -> None:
        """Store the log-probabilities of tokens after the reasoning and before calls."""
        entries = (choice.get("logprobs") or {}).get("content") or []
        skip = max(0, self._num_reasoning() - self._num_seen)
        self._num_seen += len(entries)
        self._logprobs += entries[skip:]

    def _response_event(self, name: str) -> Json:
        return {"type": f"response.{name}", "response": dict(self.response)}

    def _last(self) -> Json:
        return {"type": LAST[self.response["status"]], "response": self.response}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

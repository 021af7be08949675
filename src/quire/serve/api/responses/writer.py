"""`ResponseWriter`: chunks of a chat go in, events of the Responses API come out, and in the end
there is the whole response.

An item ends where the next one begins, so there is one open at most. Events are numbered from 0;
each is to be encoded before the next is asked for.
"""

from collections.abc import Callable, Collection
from typing import Any

from quire.serve.api.responses.custom_tools import InputText
from quire.serve.api.responses.output_item import PREFIXES, Kind, OutputItem

Json = dict[str, Any]

LAST = {
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # there is no event of its own
}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
CANCELLED = "abort"


class ResponseWriter:
    """response: what is known of it before there is an answer. new_id: of a kind of items.
    num_reasoning: how many of the tokens so far are reasoning. is_queued: nobody waits for the
    response, which says when it is begun with. custom: the names of custom tools."""

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
        self._input: InputText | None = None  # of the open item, if that calls a custom tool
        self._reason = "stop"
        self._num_events = 0
        self._num_seen = 0  # tokens with logprobs
        self._logprobs: list[Json] = []  # of the message's tokens whose text is not there yet

    @property
    def is_over(self) -> bool:
        return self.response["status"] in LAST

    def begin(self) -> list[Json]:
        """Return the first events."""
        return self._numbered([self._told("created"), self._told(self.response["status"])])

    def take(self, choice: Json) -> list[Json]:
        """Return the events of one choice of a chunk."""
        delta = choice["delta"]
        self._take_logprobs(choice)
        found: list[Json] = []
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            found.append(self._told("in_progress"))
        if text := delta.get("reasoning"):
            found += self._write("reasoning", text)
        if text := delta.get("content"):
            found += self._write("message", text)
        for call in delta.get("tool_calls") or ():
            found += self._write_call(call)
        self._reason = choice["finish_reason"] or self._reason
        return self._numbered(found)

    def end(self, usage: Json, completed_s: int) -> list[Json]:
        """Return the last events of an answer that has come to its end."""
        found: list[Json] = []
        if self._item is None and not self.response["output"]:
            found += self._open("message")  # an empty answer is one
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
        """Keep the log-probabilities of tokens behind the reasoning and before calls."""
        entries = (choice.get("logprobs") or {}).get("content") or []
        skip = max(0, self._num_reasoning() - self._num_seen)
        self._num_seen += len(entries)
        self._logprobs += entries[skip:]

    def _told(self, name: str) -> Json:
        return {"type": f"response.{name}", "response": dict(self.response)}

    def _last(self) -> Json:
        return {"type": LAST[self.response["status"]], "response": self.response}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

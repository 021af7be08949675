"""An answer's JSON on its way out through hooks, whatever made it: chunks of a stream, or choices.

Other fields must not reveal text that a hook has not seen. Log-probabilities and token ids may
arrive before their text. So they wait until their choice ends, and go with its last chunk. If a
hook has changed the choice, they are dropped. Calls of tools are kept until they are whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.base.requests.hooks import CONTENT_FILTER, EndRequest, Kind
from quire.serve.hooks.hooks import RequestHooks

Json = dict[str, Any]

# The fields of a text in a delta, a message or a choice of completions.
FIELDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("reasoning", ("reasoning", "reasoning_content")),
    ("content", ("content", "text")),
)
# Fields about a text, and their empty values.
OTHER_FIELDS = {"logprobs": None, "token_ids": (), "routed_experts": None}


@dataclass
class _Call:
    """A call of a tool of which there may be more to come."""

    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    def take(self, delta: Json) -> None:
        function = delta.get("function") or {}
        self.call_id = delta.get("id") or self.call_id
        self.name += function.get("name") or ""
        self.pieces.append(function.get("arguments") or "")

    def whole(self) -> Json:
        function = {"name": self.name, "arguments": "".join(self.pieces)}
        return {"index": self.index, "id": self.call_id, "type": "function", "function": function}


@dataclass
class _Choice:
    """State of one choice. is_changed: by a hook, anywhere. names: the fields that its
    texts had. call: the incomplete call. kept: by the names of OTHER_FIELDS."""

    hooks: RequestHooks
    has_begun: bool = False
    has_ended: bool = False
    is_changed: bool = False
    names: dict[Kind, list[str]] = field(default_factory=dict)
    call: _Call | None = None
    kept: Json = field(default_factory=dict)

    async def pass_texts(self, choice: Json, holder: Json, is_last: bool) -> None:
        """Change the texts of a delta or a message. At the end hooks are asked also about texts
        that have nothing new, so that they can give what they held back."""
        for kind, fields in FIELDS:
            there = [name for name in fields if holder.get(name)]
            if there:
                self.names[kind] = there
            elif not is_last or (kind == "reasoning" and kind not in self.names):
                continue
            text = holder[there[0]] if there else ""
            new = await self.hooks.on_output(choice["index"], kind, text, is_last)
            if new != text:
                self.is_changed = True
                usual = "text" if "text" in holder else "content"
                holder.update(dict.fromkeys(self.names.get(kind, [usual]), new))

    async def pass_calls(self, choice: Json, calls: list[Json]) -> None:
        """Change calls that are whole."""
        for call in calls:
            function = call["function"]
            given = function["name"], function["arguments"]
            new = await self.hooks.on_tool_call(choice["index"], call["id"], *given)
            self.is_changed |= new != given
            function["name"], function["arguments"] = new

    def take_calls(self, delta: Json, is_last: bool) -> list[Json]:
        """Take the calls out of a delta, and return the calls that are complete now."""
        found: list[_Call] = []
        for each in delta.pop("tool_calls", None) or ():
            if self.call is None or self.call.index != each["index"]:
                found += [] if self.call is None else [self.call]
                self.call = _Call(each["index"])
            self.call.take(each)
        if is_last and self.call is not None:
            found.append(self.call)
            self.call = None
        return [call.whole() for call in found]

    def keep_others(self, choice: Json, is_last: bool) -> None:
        """Hold back the fields about the text, or restore them once all of the text was passed."""
        for name, nothing in OTHER_FIELDS.items():
            if choice.get(name) is None:
                continue
            self.kept[name] = _joined(self.kept.get(name), choice[name])
            is_notified = is_last and not self.is_changed
            choice[name] = self.kept[name] if is_notified else nothing


class HookedAnswer:
    """requests: the hooks of each prompt. counts: how many choices each of them has.

    has_ended: a hook has ended the request.
    """

    def __init__(self, requests: Sequence[RequestHooks], counts: Sequence[int]) -> None:
        pairs = zip(requests, counts, strict=True)
        self._choices = [_Choice(hooks) for hooks, count in pairs for _ in range(count)]
        self._reason: str | None = None

    @property
    def has_ended(self) -> bool:
        return self._reason is not None

    async def chunks(self, chunks: list[Json]) -> list[Json]:
        """Return the chunks to send instead. When a hook ends the request, the ends of all open
        choices follow. Raises HookFailed."""
        passed: list[Json] = []
        for chunk in chunks:
            [choice] = chunk["choices"]
            mine = self._choices[choice["index"]]
            try:
                await _pass_delta(mine, choice)
            except EndRequest as end:
                self._reason = end.reason
                return passed + self._ends(is_chat="delta" in choice)
            mine.has_begun = True
            mine.has_ended = choice["finish_reason"] is not None
            if len(chunk) > 1 or not _is_empty(choice):
                passed.append(chunk)
        return passed

    async def whole(self, choice: Json) -> Json:
        """Return the whole choice to send instead; without text if a hook has ended the request.
        Raises HookFailed."""
        mine = self._choices[choice["index"]]
        if self._reason is None:
            message = choice.get("message", choice)
            try:
                await mine.pass_texts(choice, message, is_last=True)
                await mine.pass_calls(choice, message.get("tool_calls") or [])
            except EndRequest as end:
                self._reason = end.reason
            else:
                mine.keep_others(choice, is_last=True)
                return choice
        message = {"role": "assistant", "content": "", "refusal": None}
        text = {"message": message} if "message" in choice else {"text": ""}
        return self._end(choice["index"], text)

    def _ends(self, is_chat: bool) -> list[Json]:
        """Return the last chunks of all choices that are open."""
        found = []
        for index, choice in enumerate(self._choices):
            if not choice.has_ended:
                delta = {} if choice.has_begun else {"role": "assistant", "content": ""}
                text = {"delta": delta} if is_chat else {"text": ""}
                found.append({"choices": [self._end(index, text)]})
        return found

    def _end(self, index: int, text: Json) -> Json:
        end = {"finish_reason": CONTENT_FILTER, "stop_reason": self._reason}
        return {"index": index, **text, "logprobs": None, **end}


async def _pass_delta(mine: _Choice, choice: Json) -> None:
    """Change the choice of a chunk."""
    delta: Json = choice.get("delta", choice)
    is_last = choice["finish_reason"] is not None
    whole = None
    if mine.hooks.see("on_tool_call"):
        whole = mine.take_calls(delta, is_last)
    await mine.pass_texts(choice, delta, is_last)
    if whole:
        await mine.pass_calls(choice, whole)
        delta["tool_calls"] = whole
    mine.keep_others(choice, is_last)


def _is_empty(choice: Json) -> bool:
    """Return whether a chunk's choice is empty."""
    notified: Json = choice.get("delta", {"text": choice.get("text")})
    about_prompt = "prompt_token_ids" in choice or "prompt_logprobs" in choice
    return not (any(notified.values()) or choice["finish_reason"] or about_prompt)


def _joined(before: Any, value: Any) -> Any:
    """Join lists, or the lists of two objects by name."""
    if isinstance(value, dict):
        before = before or {}
        return {name: _joined(before.get(name), part) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    joined: list[Any] = [] if before is None else before
    joined.extend(value)
    return joined

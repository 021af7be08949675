"""`ParsedAnswer`: the reasoning, content and calls of one choice as the fields of a message."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from quire.base.requests.outputs import CompletionOutput
from quire.base.requests.sampling_params import SamplingParams
from quire.render.answers.format import RequestedAnswer
from quire.render.answers.parser import AnswerParser
from quire.render.answers.parts import CallArguments, CallBegun, Content, Part, Reasoning
from quire.render.tokens.detokenizer import IncrementalDetokenizer
from quire.render.tokens.tokenizer import Tokenizer
from quire.serve.bodies.protocol import ChatCompletionRequest

Json = dict[str, Any]


class ReasoningCount:
    """Counts the tokens of reasoning. The parser reports the character of the answer at which
    reasoning ends; a detokeniser of the answer's kind finds the token of that character."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._ends: list[int] = []  # of each token's text
        self._is_over = False
        self.num_tokens = 0  # so far

    def take(self, token_ids: Sequence[int], end: int | None) -> None:
        """Count new tokens. end: the character at which reasoning ends, 0 if there is none; None
        while it continues."""
        if self._is_over:
            return
        if end == 0:
            self._is_over, self.num_tokens = True, 0
            return
        at = self._ends[-1] if self._ends else 0
        for token_id in token_ids:
            at += len(self._detokenizer.push(token_id))
            self._ends.append(at)
        self.num_tokens = len(self._ends)
        if end is not None:
            self._is_over = True
            self.num_tokens = min(bisect_left(self._ends, end) + 1, len(self._ends))


class ParsedAnswer:
    """Parses the text of one choice. Each completion is passed to `whole` or `deltas` once."""

    def __init__(
        self, parser: AnswerParser, count: ReasoningCount | None, shows_reasoning: bool = True
    ) -> None:
        """Create the parser. count: counts the tokens of reasoning, for models that reason.
        shows_reasoning: whether the client gets the text of the reasoning."""
        self._parser = parser
        self._count = count
        self._shows_reasoning = shows_reasoning
        self._arguments: dict[int, str] = {}  # of each call so far

    def whole(self, completion: CompletionOutput) -> tuple[str, Json]:
        """Return the content of a whole answer, and the other fields of its message."""
        made = self._made_of(self._parsed(completion))
        message: Json = _as_reasoning(made["reasoning"]) if made.get("reasoning") else {}
        if calls := made.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
        return made.get("content", ""), message

    def deltas(self, completion: CompletionOutput) -> list[Json]:
        """Return the deltas of new text in the order of writing; only text whose kind is certain.
        The last delta may be empty."""
        deltas = [self._made_of(run) for run in _runs(self._parsed(completion))]
        for delta in deltas:
            if thought := delta.pop("reasoning", ""):
                delta |= _as_reasoning(thought)
        return deltas

    def num_reasoning(self, token_ids: Sequence[int]) -> int | None:
        """Count new tokens, and return by how many the tokens of reasoning grew; None for a model
        that writes no reasoning."""
        if self._count is None:
            return None
        before = self._count.num_tokens
        self._count.take(token_ids, self._parser.reasoning_end)
        return self._count.num_tokens - before

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls and all are complete; a stop string may have cut one off."""
        try:
            for text in self._arguments.values():
                json.loads(text)
            return bool(self._arguments)
        except (ValueError, RecursionError):
            return False

    def _parsed(self, completion: CompletionOutput) -> list[Part]:
        parts = self._parser.push(completion.text)
        return parts if completion.finish_reason is None else parts + self._parser.flush()

    def _made_of(self, parts: Iterable[Part]) -> Json:
        """Return the fields of a delta made of parts. Each call has one entry with its new text."""
        made: Json = {}
        calls: dict[int, Json] = {}
        for part in parts:
            if isinstance(part, Content):
                made["content"] = made.get("content", "") + part.text
            elif isinstance(part, Reasoning) and self._shows_reasoning:
                made["reasoning"] = made.get("reasoning", "") + part.text
            elif isinstance(part, CallBegun):
                self._arguments[part.index] = ""
                function = {"name": part.name, "arguments": ""}
                head: Json = {"index": part.index, "id": part.id, "type": "function"}
                calls[part.index] = head | {"function": function}
            elif isinstance(part, CallArguments):
                self._arguments[part.index] += part.text
                new: Json = {"index": part.index, "function": {"arguments": ""}}
                calls.setdefault(part.index, new)["function"]["arguments"] += part.text
        if calls:
            made["tool_calls"] = list(calls.values())
        return made


def parsed_answer(
    form: RequestedAnswer,
    body: ChatCompletionRequest,
    tokenizer: Tokenizer | None,
    params: SamplingParams,
    prompt_token_ids: list[int],
) -> ParsedAnswer:
    """Return the parser of one choice of a chat, which counts reasoning if the model reasons."""
    count = None
    if form.format.reasoning is not None and tokenizer is not None:
        count = ReasoningCount(IncrementalDetokenizer(tokenizer, params, prompt_token_ids))
    return ParsedAnswer(form.parser(), count, body.include_reasoning is not False)


def _runs(parts: Iterable[Part]) -> list[list[Part]]:
    """Split parts into runs that are one delta each: reasoning, then content, then calls."""
    runs, last = [list[Part]()], 0
    for part in parts:
        kind = 0 if isinstance(part, Reasoning) else 1 if isinstance(part, Content) else 2
        if kind < last:
            runs.append([])
        last = kind
        runs[-1].append(part)
    return runs


def _as_reasoning(text: str) -> Json:
    """Return reasoning under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}

"""`ChatChoice`: one message of a chat's answer (reasoning, content, calls), whole or as deltas."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.render.answers.format import NamedTool
from quire.render.answers.parser import AnswerParser
from quire.render.answers.parts import CallArguments, CallBegun, Content, Part, Reasoning
from quire.render.tokens.detokenizer import IncrementalDetokenizer
from quire.serve.bodies.logprobs_json import TokenNames, chat_logprobs, prompt_logprobs_json
from quire.serve.bodies.protocol import ChatCompletionRequest, GenerationRequest
from quire.serve.context import ApiContext
from quire.serve.pipeline.answer import Json, UsageCounter
from quire.serve.pipeline.plan import ChatPlan
from quire.serve.pipeline.requests import Chat, PromptJob

ROLE = "assistant"


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


class ChatChoice:
    """One of the n choices of a chat."""

    role = ROLE  # of the message

    def __init__(
        self,
        index: int,
        plan: ChatPlan,
        job: PromptJob,
        names: TokenNames | None,
        usage: UsageCounter,
        parser: AnswerParser | None = None,
        reasoning: ReasoningCount | None = None,
        named_call_stops: bool = False,
    ) -> None:
        """Begin a choice.

        names: how tokens are shown; None where no log-probabilities are. usage: shared by all n.
        parser: separates reasoning and calls from the content; None for a model that writes
        neither. reasoning: counts the tokens of reasoning. named_call_stops: a call ends the answer
        with `stop`, since the request names the tool.
        """
        body = plan.body
        self.usage = usage
        self._index = index
        self._body = body
        self._job = job
        self._names = names
        self._parser = parser
        self._reasoning = reasoning
        self._named_call_stops = named_call_stops
        self._echo = _last_text(body) if body.echo else ""
        self._begun = False
        self._arguments: dict[int, str] = {}  # of each call so far
        self._num_top = len(body.logprob_token_ids or ()) or body.top_logprobs or 0
        # These make a chunk worth sending although it has no text.
        self._always = names is not None or body.return_token_ids or plan.usage.in_each

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        found = [] if self._begun else [self._first_chunk(output)]
        *before, delta = self._deltas(completion)
        self._count(output, completion)
        for each in before:
            choice = {"index": self._index, "delta": each, "logprobs": None, "finish_reason": None}
            found.append({"choices": [choice]})
        if delta or completion.finish_reason or self._always:
            choice = {"index": self._index, "delta": delta} | self._beside(completion)
            found.append({"choices": [choice]})
        return found

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        if self._parser is None:
            content, thought, calls = completion.text, "", list[Json]()
        else:
            made = self._made_of(self._parsed(self._parser, completion))
            content, thought = made.get("content", ""), made.get("reasoning", "")
            calls = made.get("tool_calls", [])
        self._count(output, completion)
        content = self._echo + content
        message: Json = {"role": self.role, "content": content or (None if calls else "")}
        message["refusal"] = None
        if thought:
            message |= _as_reasoning(thought)
        if calls:
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
        choice = {"index": self._index, "message": message} | self._beside(completion)
        beside: Json = {} if self._index else {"prompt_logprobs": None}
        return {"choices": [choice]} | beside | self._about_prompt(output)

    def _first_chunk(self, output: RequestOutput) -> Json:
        self._begun = True
        choice = {
            "index": self._index,
            "delta": {"role": self.role, "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }
        return {"choices": [choice]} | self._about_prompt(output)

    def _deltas(self, completion: CompletionOutput) -> list[Json]:
        """Return the deltas of new text, in the order of writing. Of a parsed answer only text
        whose kind is certain is included."""
        if self._parser is None:
            return [{"content": completion.text} if completion.text else {}]
        deltas = [self._made_of(run) for run in _runs(self._parsed(self._parser, completion))]
        for delta in deltas:
            if thought := delta.pop("reasoning", ""):
                delta |= _as_reasoning(thought)
        return deltas

    def _parsed(self, parser: AnswerParser, completion: CompletionOutput) -> list[Part]:
        parts = parser.push(completion.text)
        return parts if completion.finish_reason is None else parts + parser.flush()

    def _made_of(self, parts: Iterable[Part]) -> Json:
        """Return the fields of a delta made of parts. Each call has one entry with its new text."""
        made: Json = {}
        calls: dict[int, Json] = {}
        for part in parts:
            if isinstance(part, Content):
                made["content"] = made.get("content", "") + part.text
            elif isinstance(part, Reasoning) and self._body.include_reasoning is not False:
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

    def _count(self, output: RequestOutput, completion: CompletionOutput) -> None:
        self.usage.count(len(completion.token_ids), output)
        if self._reasoning is not None and self._parser is not None:
            before = self._reasoning.num_tokens
            self._reasoning.take(completion.token_ids, self._parser.reasoning_end)
            self.usage.num_reasoning = self.usage.num_reasoning or 0
            self.usage.num_reasoning += self._reasoning.num_tokens - before

    def _beside(self, completion: CompletionOutput) -> Json:
        """Return the fields of a choice besides its message or delta."""
        reason = completion.finish_reason
        fields: Json = {"logprobs": None, "finish_reason": reason}
        if reason == "stop" and self._has_whole_calls and not self._named_call_stops:
            fields["finish_reason"] = "tool_calls"
        if reason is not None:
            fields["stop_reason"] = completion.stop_reason
        if self._names is not None:
            fields["logprobs"] = chat_logprobs(
                self._names,
                completion.token_ids,
                completion.logprobs or (),
                self._num_top,
            )
        if self._body.return_token_ids:
            fields["token_ids"] = completion.token_ids
        return fields

    @property
    def _has_whole_calls(self) -> bool:
        """Whether there are calls and all are complete; a stop string may have cut one off."""
        try:
            for text in self._arguments.values():
                json.loads(text)
            return bool(self._arguments)
        except (ValueError, RecursionError):
            return False

    def _about_prompt(self, output: RequestOutput) -> Json:
        """Return the fields about the prompt, which only the first of the n choices shows."""
        found: Json = {}
        if self._index > 0:
            return found
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._job.request.prompt_token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return found


def chat_choices(api: ApiContext, chat: Chat, named_call_stops: bool = True) -> list[ChatChoice]:
    """Return the n choices, which share one usage. named_call_stops: an answer that calls the tool
    named by its request ends with `stop`, as OpenAI's does."""
    plan, job, form = chat.plan, chat.job, chat.form
    body, params, tokenizer = plan.body, job.request.params, api.renderer.tokenizer
    names = token_names(api, body) if body.logprobs or body.logprob_token_ids else None
    has_reasoning = form.format.reasoning is not None
    num_reasoning = 0 if has_reasoning else None
    usage = UsageCounter(
        len(job.request.prompt_token_ids), tenant=plan.tenant, num_reasoning=num_reasoning
    )
    stops = named_call_stops and isinstance(form.choice, NamedTool)
    choices = []
    for index in range(params.n):
        parser = form.parser() if has_reasoning or form.calls is not None else None
        counts = None
        if has_reasoning and tokenizer is not None:
            counts = ReasoningCount(
                IncrementalDetokenizer(tokenizer, params, job.request.prompt_token_ids)
            )
        choices.append(ChatChoice(index, plan, job, names, usage, parser, counts, stops))
        choices[-1].role = api.config.response_role
    return choices


def token_names(api: ApiContext, body: GenerationRequest) -> TokenNames:
    """Return how the tokens of log-probabilities are shown."""
    as_ids = body.return_tokens_as_token_ids
    shows_ids = api.config.return_tokens_as_token_ids if as_ids is None else as_ids
    return TokenNames(api.renderer.tokenizer, shows_ids)


def _runs(parts: Iterable[Part]) -> list[list[Part]]:
    """Split parts into runs that are one delta each: reasoning, then content, then calls."""
    runs, place = [list[Part]()], 0
    for part in parts:
        now = 0 if isinstance(part, Reasoning) else 1 if isinstance(part, Content) else 2
        if now < place:
            runs.append([])
        place = now
        runs[-1].append(part)
    return runs


def _as_reasoning(text: str) -> Json:
    """Return reasoning under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _last_text(body: ChatCompletionRequest) -> str:
    """Return the last message's text, which the answer continues, if it is the assistant's."""
    last = body.messages[-1]
    content = last.get("content")
    return content if last.get("role") == ROLE and isinstance(content, str) else ""

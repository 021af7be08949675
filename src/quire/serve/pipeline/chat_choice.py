"""`ChatChoice`: one message of a chat's answer (reasoning, content, calls), whole or as deltas."""

from typing import Any

from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.render.answers.format import NamedTool
from quire.serve.bodies.logprobs_json import TokenNames, chat_logprobs, prompt_logprobs_json
from quire.serve.bodies.protocol import ChatCompletionRequest, GenerationRequest
from quire.serve.context import ApiContext
from quire.serve.pipeline.answer import Json, UsageCounter, weights_fields
from quire.serve.pipeline.parsed_answer import ParsedAnswer, parsed_answer
from quire.serve.pipeline.plan import ChatPlan
from quire.serve.pipeline.requests import Chat, PromptJob

ROLE = "assistant"


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
        parsed: ParsedAnswer | None = None,
        named_call_stops: bool = False,
    ) -> None:
        """Begin a choice.

        names: how tokens are shown; None where no log-probabilities are. usage: shared by all n.
        parsed: separates reasoning and calls from the content; None for a model that writes
        neither. named_call_stops: a call ends the answer with `stop`, since the request names the
        tool.
        """
        body = plan.body
        self.usage = usage
        self._index = index
        self._body = body
        self._job = job
        self._names = names
        self._parsed = parsed
        self._named_call_stops = named_call_stops
        self._echo = _last_text(body) if body.echo else ""
        self._begun = False
        self._num_top = len(body.logprob_token_ids or ()) or body.top_logprobs or 0
        # These make a chunk worth sending although it has no text.
        self._always = names is not None or body.return_token_ids or plan.usage.in_each

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        found = [] if self._begun else [self._first_chunk(output)]
        before, delta = list[Json](), {"content": completion.text} if completion.text else {}
        if self._parsed is not None:
            *before, delta = self._parsed.deltas(completion)
        self._count(output, completion)
        for each in before:
            choice = {"index": self._index, "delta": each, "logprobs": None, "finish_reason": None}
            found.append({"choices": [choice]})
        if delta or completion.finish_reason or self._always:
            choice = {"index": self._index, "delta": delta} | self._other_fields(completion)
            found.append({"choices": [choice]})
        return found

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        content, others = completion.text, dict[str, Any]()
        if self._parsed is not None:
            content, others = self._parsed.whole(completion)
        self._count(output, completion)
        content = self._echo + content
        message: Json = {
            "role": self.role,
            "content": content or (None if "tool_calls" in others else ""),
            "refusal": None,
        }
        message |= others
        choice = {"index": self._index, "message": message} | self._other_fields(completion)
        others_of_first: Json = {} if self._index else {"prompt_logprobs": None}
        return {"choices": [choice]} | others_of_first | self._about_prompt(output)

    def _first_chunk(self, output: RequestOutput) -> Json:
        self._begun = True
        choice = {
            "index": self._index,
            "delta": {"role": self.role, "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }
        return {"choices": [choice]} | self._about_prompt(output)

    def _count(self, output: RequestOutput, completion: CompletionOutput) -> None:
        self.usage.count(len(completion.token_ids), output)
        if self._parsed is None:
            return
        if (num := self._parsed.num_reasoning(completion.token_ids)) is not None:
            self.usage.num_reasoning = (self.usage.num_reasoning or 0) + num

    def _other_fields(self, completion: CompletionOutput) -> Json:
        """Return the fields of a choice besides its message or delta."""
        reason = completion.finish_reason
        fields: Json = {"logprobs": None, "finish_reason": reason}
        if reason == "stop" and self._parsed is not None and not self._named_call_stops:
            fields["finish_reason"] = "tool_calls" if self._parsed.has_whole_calls else reason
        if reason is not None:
            fields |= {"stop_reason": completion.stop_reason} | weights_fields(completion)
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
        parsed = None
        if has_reasoning or form.calls is not None:
            prompt = job.request.prompt_token_ids
            parsed = parsed_answer(form, body, tokenizer, params, prompt)
        choices.append(ChatChoice(index, plan, job, names, usage, parsed, stops))
        choices[-1].role = api.config.response_role
    return choices


def token_names(api: ApiContext, body: GenerationRequest) -> TokenNames:
    """Return how the tokens of log-probabilities are shown."""
    as_ids = body.return_tokens_as_token_ids
    shows_ids = api.config.return_tokens_as_token_ids if as_ids is None else as_ids
    return TokenNames(api.renderer.tokenizer, shows_ids)


def _last_text(body: ChatCompletionRequest) -> str:
    """Return the last message's text, which the answer continues, if it is the assistant's."""
    last = body.messages[-1]
    content = last.get("content")
    return content if last.get("role") == ROLE and isinstance(content, str) else ""

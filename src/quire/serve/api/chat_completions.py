"""POST /v1/chat/completions: a conversation, answered; calls of tools are taken out of the text."""

import time
import uuid
from typing import Any

import fastapi
from starlette.responses import Response

from quire.base.errors import RequestError
from quire.base.outputs import CompletionOutput, RequestOutput
from quire.render.chat_template import ChatOptions
from quire.render.renderer import RenderedPrompt
from quire.render.tools import ToolCall
from quire.serve.api.answers import Answer, Json, UsageCounter
from quire.serve.api.auth import tenant_asking
from quire.serve.api.context import Api, ApiContext, new_id
from quire.serve.api.errors import error_in
from quire.serve.api.hooked_prompt import admitted_chat
from quire.serve.api.jobs import PromptJob, make_job
from quire.serve.api.logprobs_json import TokenNames, chat_logprobs, prompt_logprobs_json
from quire.serve.api.params import (
    chat_params,
    check_stream_options,
    check_top_logprobs,
    room_beside,
    truncated,
)
from quire.serve.api.protocol import ChatCompletionRequest
from quire.serve.api.reading import BoundedRoute
from quire.serve.api.rendering import check_model, render_prompt
from quire.serve.api.structured import checked_grammar
from quire.serve.api.tool_stream import ToolCallStream, parse_answer
from quire.serve.api.unsupported_fields import check_neutral

ROLE = "assistant"

router = fastapi.APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatCompletionRequest, request: fastapi.Request, api: Api
) -> Response:
    """The next message of a conversation, or n of them to choose from."""
    model = check_model(api, body.model)
    check_neutral(body)
    check_stream_options(body)
    check_top_logprobs(body, api.client.ready)
    answer_id = new_id("chatcmpl")
    grammar = await checked_grammar(api, body)
    body, hooks = await admitted_chat(api, body, request.scope, answer_id)
    prompt = await _render(api, body)
    room = room_beside(prompt, api.client.ready.max_model_len, "messages")
    params = chat_params(body, api.requests.defaults, room)
    tenant = tenant_asking(request.scope, api.config, body)
    job = make_job(api, body, prompt, params, answer_id, tenant, grammar)
    names = TokenNames(api.renderer.tokenizer, bool(body.return_tokens_as_token_ids))
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
    usage = UsageCounter(len(job.token_ids), tenant=job.request.tenant)
    choices = [ChatChoice(index, body, job, names, usage) for index in range(params.n)]
    answer = Answer(api.client, body, head, [job], [choices], hooks)
    return await answer.respond(request)


class ChatChoice:
    """A message, in one piece or in several. usage: the one of all n."""

    def __init__(
        self,
        index: int,
        body: ChatCompletionRequest,
        job: PromptJob,
        names: TokenNames,
        usage: UsageCounter,
    ) -> None:
        self.usage = usage
        self._index = index
        self._body = body
        self._job = job
        self._names = names
        self._echo = _last_text(body) if body.echo else ""
        self._begun = False
        self._tools = ToolCallStream() if body.parses_tools and body.stream else None
        self._num_calls = 0
        # Everything that makes a chunk worth sending although it has no text
        self._always = body.logprobs or body.return_token_ids or body.wants_running_usage

    def chunks(self, output: RequestOutput, completion: CompletionOutput) -> list[Json]:
        found = [] if self._begun else [self._first_chunk(output)]
        self.usage.count(len(completion.token_ids), output)
        delta = self._delta(completion)
        if delta or completion.finish_reason or self._always:
            choice = {"index": self._index, "delta": delta} | self._beside(completion)
            found.append({"choices": [choice]})
        return found

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        self.usage.count(len(completion.token_ids), output)
        content, calls = completion.text, list[ToolCall]()
        if self._body.parses_tools:
            content, calls = parse_answer(completion.text)
        content = self._echo + content
        message: Json = {"role": ROLE, "content": content or (None if calls else "")}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        choice = {"index": self._index, "message": message} | self._beside(completion)
        return {"choices": [choice]} | self._about_prompt(output)

    def _first_chunk(self, output: RequestOutput) -> Json:
        self._begun = True
        choice = {
            "index": self._index,
            "delta": {"role": ROLE, "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }
        return {"choices": [choice]} | self._about_prompt(output)

    def _delta(self, completion: CompletionOutput) -> Json:
        """Return what is new; of an answer that may call tools, what is certain."""
        if self._tools is None:
            return {"content": completion.text} if completion.text else {}
        pieces = self._tools.push(completion.text)
        if completion.finish_reason is not None:
            pieces += self._tools.flush()
        delta: Json = {}
        text = "".join([piece for piece in pieces if isinstance(piece, str)])
        if text:
            delta["content"] = text
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _call(self, call: ToolCall) -> Json:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        function = {"name": call.name, "arguments": call.arguments}
        shown: Json = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        return {"index": number} | shown if self._body.stream else shown

    def _beside(self, completion: CompletionOutput) -> Json:
        """Return the fields of a choice beside its message or delta."""
        reason = completion.finish_reason
        fields: Json = {"logprobs": None, "finish_reason": reason}
        if reason == "stop" and self._num_calls:
            fields["finish_reason"] = "tool_calls"
        if reason is not None:
            fields["stop_reason"] = completion.stop_reason
        if self._body.logprobs:
            fields["logprobs"] = chat_logprobs(
                self._names,
                completion.token_ids,
                completion.logprobs or (),
                self._body.top_logprobs or 0,
            )
        if self._body.return_token_ids:
            fields["token_ids"] = completion.token_ids
        return fields

    def _about_prompt(self, output: RequestOutput) -> Json:
        """Once for all n."""
        found: Json = {}
        if self._index > 0:
            return found
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._job.token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return found


async def _render(api: ApiContext, body: ChatCompletionRequest) -> RenderedPrompt:
    """Return the conversation as tokens. tool_choice `none` leaves the tools out of it."""
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    options = ChatOptions(
        add_generation_prompt=begins,
        continue_final_message=goes_on,
        tools=body.tools if body.parses_tools else None,
        documents=body.documents,
        template_kwargs=variables,
    )
    try:
        is_cut = body.truncate_prompt_tokens is not None
        prompt = await render_prompt(api, body.messages, options, body.chat_template, is_cut=is_cut)
        if body.add_special_tokens and prompt.text is not None:
            prompt = await render_prompt(api, prompt.text, is_cut=is_cut)
    except RequestError as error:
        raise error_in("messages", error) from error
    return truncated(prompt, body, api.client.ready.max_model_len)


def _last_text(body: ChatCompletionRequest) -> str:
    """Return what the answer goes on from, if the last message is the assistant's."""
    last = body.messages[-1]
    content = last.get("content")
    return content if last.get("role") == ROLE and isinstance(content, str) else ""

"""One HTTP request to a pooling model: from its inputs to the pooled numbers."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastapi
import msgspec
from starlette.responses import Response

from quire.base.errors import RequestError
from quire.base.plan import Float64
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.pooling import PoolingSpec
from quire.base.requests.pooling_params import PoolingParams, needed_task
from quire.engine.client.admission import admit
from quire.render.pooling_prompts import joined, truncation_limit
from quire.render.renderer import RenderedPrompt
from quire.render.templates.chat_template import ChatOptions
from quire.serve.async_renderer import MAX_CHARS_SHORT
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.pooling_protocol import MAX_INPUTS, PoolingBody, PromptBody
from quire.serve.context import ApiContext
from quire.serve.errors import bad_request, error_in
from quire.serve.http.middleware import new_id
from quire.serve.http.sse import unless_disconnected
from quire.serve.pipeline.answer import Json, collect
from quire.serve.pipeline.hooked_prompt import admitted_prompts
from quire.serve.pipeline.plan import checked_template, plan_body
from quire.serve.pipeline.prompts import render_prompt, tokenizer_of
from quire.serve.pipeline.requests import PromptJob
from quire.serve.python.pooling import numbers_of


@dataclass(frozen=True)
class CutText:
    """A text that is cut to its first `max_tokens` tokens."""

    text: str
    max_tokens: int


class PoolingCall:
    """One HTTP request to a model that supports one of the `tasks`. All methods, and the
    constructor, raise ApiError or RequestError."""

    def __init__(
        self,
        api: ApiContext,
        body: PoolingBody,
        request: fastapi.Request,
        prefix: str,
        params: PoolingParams,
        *tasks: str,
    ) -> None:
        check_neutral(body)
        self._plan = plan_body(api, body, request.scope, new_id(prefix))
        self.model, self.id = self._plan.model, self._plan.id
        self.spec: PoolingSpec = needed_task(api.client.ready.pooling, *tasks)
        self._api, self._body, self._request, self._params = api, body, request, params
        chats = isinstance(body, PromptBody) and body.messages is not None
        self._has_special = body.add_special_tokens is not False
        if chats:  # the template adds special tokens
            self._has_special = body.add_special_tokens is True

    async def prompts(self, body: PromptBody) -> list[object]:
        """Return the prompts of a body, as hooks changed them: its inputs, or the text of its
        conversation."""
        if body.messages is None:
            return await self.admitted(split_inputs(body.input))
        if body.input is not None:
            raise bad_request("give either input or messages, not both.", "messages")
        options = ChatOptions(
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        )
        template = checked_template(self._api, body.chat_template)
        is_cut = self._params.truncate_prompt_tokens is not None
        found = await render_prompt(self._api, body.messages, options, template, is_cut=is_cut)
        return await self.admitted([found.text])

    async def admitted(self, prompts: list[object]) -> list[object]:
        """Return texts and token ids as hooks changed them."""
        return (await admitted_prompts(self._api, self._plan, prompts))[0]

    async def run(
        self, inputs: Sequence[Sequence[object]], field: str
    ) -> tuple[list[Float64], Json]:
        """Pool each input, a list of one prompt or of a pair of texts; return the numbers `[K]` of
        each, and the usage. field: the inputs' field, for errors."""
        try:
            jobs = [await self._job(parts, index) for index, parts in enumerate(inputs)]
        except RequestError as error:
            raise error_in(field, error) from error
        work = collect(self._api.client, jobs)
        outputs = await unless_disconnected(self._request.receive, work)
        return [numbers_of(each, self.spec, self._params) for each in outputs], usage_json(outputs)

    async def answer(self, value: Json | list[Json]) -> Response:
        """Encode a response, which may be long, in a thread."""
        return await self._api.text_threads.run(MAX_CHARS_SHORT, _as_json, value)

    async def _job(self, parts: Sequence[object], index: int) -> PromptJob:
        api, body = self._api, self._body
        prompt = await self._rendered(parts)
        await asyncio.sleep(0)  # short texts are tokenised on the event loop
        made = api.requests.make_pooling(
            prompt,
            f"{self.id}-{index}",
            body.cache_salt or "",
            body.priority or 0,
            self._plan.tenant,
            body.timeout_s or 0.0,
            has_text_pairs=self.spec.has_text_pairs,
        )
        return PromptJob(prompt, admit(api.client, made, core_id=self._plan.core_id))

    async def _rendered(self, parts: Sequence[object]) -> RenderedPrompt:
        api, has_special = self._api, self._has_special
        max_tokens = truncation_limit(self._params, api.client.ready.max_model_len)
        is_whole = max_tokens is None and len(parts) == 1 and not isinstance(parts[0], CutText)
        special, is_cut = is_whole and has_special, max_tokens is not None
        texts = [await self._text(part, special, is_cut) for part in parts]
        if is_whole:
            return texts[0]
        frame: list[list[int]] = [[] for _ in range(len(parts) + 1)]
        if has_special and all(text.text is not None for text in texts):
            frame = tokenizer_of(api).frame(len(parts))
        return joined(
            [text.token_ids for text in texts], frame, max_tokens, self._params.truncation_side
        )

    async def _text(self, part: object, special: bool, is_cut: bool) -> RenderedPrompt:
        if not isinstance(part, CutText):
            return await render_prompt(self._api, part, add_special_tokens=special, is_cut=is_cut)
        whole = await render_prompt(self._api, part.text, add_special_tokens=False, is_cut=True)
        return dataclasses.replace(whole, token_ids=whole.token_ids[: part.max_tokens])


def field_of(body: PromptBody) -> str:
    """Return the name of the field that holds a body's prompts."""
    return "input" if body.messages is None else "messages"


def params_of(body: PoolingBody) -> PoolingParams:
    """Return the pooling parameters that all pooling bodies have."""
    return PoolingParams(
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "right",
    )


def split_inputs(value: object, field: str = "input") -> list[object]:
    """Return the prompts in a field, each a text or token ids. Raises ApiError."""
    if value is None:
        raise bad_request(f"{field} is required; add a text or a list of token ids.", field)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _wrong_input(field)
    if isinstance(value[0], int):
        return [value]
    if len(value) > MAX_INPUTS:
        raise bad_request(
            f"{field} has {len(value)} entries; at most {MAX_INPUTS} are possible. Send several"
            " requests.",
            field,
        )
    if not all(isinstance(item, str | list) for item in value):
        raise _wrong_input(field)
    return list(value)


def split_texts(value: object, field: str) -> list[object]:
    """Return the texts in a field, each given as a text or as {"text": ...}. Raises ApiError."""
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list) and found:
        texts = [each.get("text") if isinstance(each, Mapping) else each for each in found]
        if all(isinstance(text, str) for text in texts):
            return texts
    raise bad_request(f"{field} must be a text or a list of texts, and not empty.", field)


def usage_json(outputs: Sequence[RequestOutput]) -> Json:
    """Return the usage of all prompts together."""
    num = sum(len(output.prompt_token_ids or ()) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return {
        "prompt_tokens": num,
        "completion_tokens": 0,
        "total_tokens": num,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _as_json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _wrong_input(field: str) -> Exception:
    return bad_request(
        f"{field} must be a text, a list of texts, a list of token ids or a list of such lists, and"
        " not empty.",
        field,
    )

"""POST /completion and /infill: continue a text, or fill in its middle, as llama.cpp's server."""

import fastapi
from starlette.responses import Response

from quire.render.infill import Infill
from quire.serve.bodies.any_type import AnyTypeRoute
from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.open_body import check_neutral
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import Api, ApiContext
from quire.serve.errors import bad_request
from quire.serve.http.middleware import new_id
from quire.serve.http.sse import (
    DONE,
    encode,
    error_event,
    start_stream,
    unless_disconnected,
)
from quire.serve.llamacpp.as_completion import completion_of, extra_text
from quire.serve.llamacpp.protocol import CompletionBody, InfillBody, NativeBody
from quire.serve.llamacpp.writer import CompletionWriter, stream, whole
from quire.serve.openai.completions import filled
from quire.serve.pipeline.answer import Answer
from quire.serve.pipeline.plan import plan_completion
from quire.serve.pipeline.prompts import render_prompt, tokenizer_of
from quire.serve.pipeline.text import start_text

router = fastapi.APIRouter(route_class=AnyTypeRoute)


@router.post("/completion")
@router.post("/completions")
async def complete(body: CompletionBody, request: fastapi.Request, api: Api) -> Response:
    """Continue a text or token ids."""
    check_neutral(body)
    completion = completion_of(body, api.renderer.tokenizer)
    return await _answer(api, body, completion, completion.prompt, request)


@router.post("/infill")
async def infill(body: InfillBody, request: fastapi.Request, api: Api) -> Response:
    """Write the text between a prefix and a suffix, after the texts of other files."""
    check_neutral(body)
    tokenizer = tokenizer_of(api)
    if Infill.of(tokenizer) is None:
        raise bad_request(
            "/infill: this model has no fill-in-the-middle tokens; use /completion.",
            "input_suffix",
            "unsupported_value",
        )
    if body.n_indent and body.stream:
        raise bad_request("n_indent needs a whole answer; set stream to false.", "n_indent")
    completion = completion_of(body, tokenizer)
    completion.suffix = body.input_suffix or ""
    completion, [prompt] = await filled(api, completion, [body.input_prefix or ""])
    assert isinstance(prompt, list)
    before, after = extra_text(body, tokenizer), body.prompt or ""
    for text, is_first in ((before, True), (after, False)):
        if text:
            ids = (await render_prompt(api, text, add_special_tokens=False)).token_ids
            prompt = ids + prompt if is_first else prompt + ids
    return await _answer(api, body, completion, prompt, request, body.n_indent or 0)


async def _answer(
    api: ApiContext,
    body: NativeBody,
    completion: CompletionRequest,
    prompt: object,
    request: fastapi.Request,
    min_indent: int = 0,
) -> Response:
    plan = plan_completion(api, completion, request.scope, new_id("cmpl"), is_lenient=True)
    text = await start_text(api, plan, prompt)
    answer = Answer(api.client, text.plan, {}, text.jobs, text.choices, text.hooks)
    [job], [[choice]] = text.jobs, text.choices
    writer = CompletionWriter(
        plan.model,
        choice.usage,
        job,
        returns_tokens=bool(body.return_tokens),
        shown=body.response_fields or (),
        min_indent=min_indent,
        max_predict_ms=body.t_max_predict_ms or 0,
    )
    if body.stream:
        response = await start_stream(request, stream(answer, writer), _last_event)
    else:
        found = await unless_disconnected(request.receive, whole(answer, writer))
        response = Response(encode(found), media_type="application/json")
    return with_warnings(response, text.grammar)


def _last_event(error: BaseException, request_id: str) -> bytes:
    """Return the last event of a stream that fails; llama.cpp's streams have no [DONE]."""
    return error_event(error, request_id).removesuffix(DONE)

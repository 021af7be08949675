"""`suffix` of completions: what the model writes stands between the prompt and it."""

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED
from quire.render.infill import Infill
from quire.serve.api.context import ApiContext
from quire.serve.api.errors import bad_request
from quire.serve.api.protocol import CompletionRequest
from quire.serve.api.rendering import render_prompt

UNLIKE = {"echo": False, "truncate_prompt_tokens": None}


async def infilled(
    api: ApiContext, body: CompletionRequest, prompts: list[object]
) -> tuple[CompletionRequest, list[object]]:
    """Return prompts with their suffix, as token ids, and the body with what ends such answers; as
    they are without a suffix. Raises ApiError for a model that does not fill in."""
    if not body.suffix:
        return body, prompts
    tokenizer = api.renderer.tokenizer
    infill = None if tokenizer is None else Infill.of(tokenizer)
    if infill is None:
        raise bad_request(
            "suffix: this model has no fill-in-the-middle tokens; remove suffix.",
            "suffix",
            "unsupported_value",
        )
    for name, neutral in UNLIKE.items():
        if getattr(body, name) not in (None, neutral):
            raise bad_request(
                f"{name} cannot be used together with suffix; remove one of them.", name
            )
    found: list[object] = [await _joined(api, infill, body, prompt) for prompt in prompts]
    if infill.ends and not body.ignore_eos:
        stops = [*(body.stop_token_ids or ()), *infill.ends]
        body = body.model_copy(update={"stop_token_ids": stops})
    return body, found


async def _joined(
    api: ApiContext, infill: Infill, body: CompletionRequest, prompt: object
) -> list[int]:
    suffix = body.suffix or ""
    special = body.add_special_tokens is not False
    before = prompt if isinstance(prompt, str) else (await render_prompt(api, prompt)).token_ids
    texts = [text for text in (before, suffix) if isinstance(text, str)]

    def joined() -> list[int]:
        _check_length(infill, texts, api.client.ready.max_model_len)
        return infill.prompt(before, suffix, special)

    return await api.lanes.run(sum(map(len, texts)), joined)


def _check_length(infill: Infill, texts: list[str], most: int) -> None:
    """Raise ApiError for texts that certainly have more tokens, without tokenising them."""
    bound = infill.tokenizer.bound
    if bound is None or sum(map(len, texts)) <= most:
        return
    at_least = sum(bound.at_least(text) for text in texts)
    if at_least > most:
        raise bad_request(
            f"prompt and suffix have {at_least} tokens or more; at most {most} are possible here;"
            " shorten them.",
            "suffix",
            CONTEXT_LENGTH_EXCEEDED,
        )

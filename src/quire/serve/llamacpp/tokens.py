"""Tokens in the format of llama.cpp's /tokenize."""

from typing import Any

import msgspec
from starlette.responses import Response

from quire.serve.bodies.logprobs_json import TokenNames
from quire.serve.context import ApiContext
from quire.serve.pipeline.prompts import render_prompt, tokenizer_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for a part of a character


async def tokens_of(
    api: ApiContext, content: str, add_special: bool, with_pieces: bool
) -> Response:
    """Return the token ids of a text. with_pieces: also the text of each, or its bytes if it is
    only a part of a character."""
    token_ids: list[int] = []
    if content:  # render_prompt refuses an empty prompt
        prompt = await render_prompt(api, content, add_special_tokens=add_special, is_cut=True)
        token_ids = prompt.token_ids
    elif add_special:
        token_ids = tokenizer_of(api).encode("", True)
    return await api.text_threads.run(len(token_ids), _shown, api, token_ids, with_pieces)


def _shown(api: ApiContext, token_ids: list[int], with_pieces: bool) -> Response:
    tokens: list[Any] = list(token_ids)
    if with_pieces:
        names = TokenNames(tokenizer_of(api), as_ids=False)
        tokens = [{"id": each, "piece": _piece(names, each)} for each in token_ids]
    return Response(msgspec.json.encode({"tokens": tokens}), media_type="application/json")


def _piece(names: TokenNames, token_id: int) -> str | list[int]:
    text = names.text(token_id, None)
    return names.bytes(token_id, text) if REPLACEMENT in text else text

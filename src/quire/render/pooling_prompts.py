"""Prompts of pooling models: one text, or a pair of texts, between special tokens.

    [CLS] first text [SEP]        [CLS] first text [SEP] second text [SEP]

Truncation shortens the texts and keeps the special tokens, because the model pools one of them.
"""

from collections.abc import Sequence
from itertools import chain

from quire.base.errors import RequestError
from quire.base.requests.pooling_params import PoolingParams
from quire.render.renderer import Prompt, RenderedPrompt, Renderer
from quire.render.truncation import FIELD, FITTING, LEFT

Ids = Sequence[int]


def to_pool(
    renderer: Renderer, parts: Sequence[Prompt], params: PoolingParams, longest: int
) -> RenderedPrompt:
    """Render one prompt or a pair of texts, truncated if requested. Raises RequestError."""
    limit = truncation_limit(params, longest)
    if limit is None and len(parts) == 1:
        return renderer.render(parts[0])
    texts = [renderer.render(part, add_special_tokens=False) for part in parts]
    is_text, tokenizer = [text.text is not None for text in texts], renderer.tokenizer
    if len(parts) == 2 and not all(is_text):
        raise RequestError("a pair to score must be two texts, not token ids.")
    frame: list[list[int]] = [[], []]
    if tokenizer is not None and all(is_text):
        frame = tokenizer.frame(len(parts))
    return joined([text.token_ids for text in texts], frame, limit, params.truncation_side)


def truncation_limit(params: PoolingParams, longest: int) -> int | None:
    """Return the maximum number of tokens of a prompt; None for no truncation.

    Raises RequestError if the request's value exceeds `longest`."""
    limit = params.truncate_prompt_tokens
    if limit is None:
        return None
    if limit < FITTING or limit > longest:
        raise RequestError(
            f"{FIELD} must be at most max_model_len = {longest}, or -1 for that, got {limit}.",
            FIELD,
        )
    return longest if limit == FITTING else limit


def joined(
    parts: Sequence[Ids], frame: Sequence[Ids], limit: int | None, side: str
) -> RenderedPrompt:
    """Put special tokens (`Tokenizer.frame`) around texts, and truncate the texts to fit `limit`.

    Raises RequestError if no tokens of the texts would remain."""
    if limit is not None:
        room = limit - sum(map(len, frame))
        if room < len(parts):
            raise RequestError(f"{FIELD}={limit} leaves no room next to the special tokens.", FIELD)
        sizes = [len(parts[0])] if len(parts) == 1 else _sizes(len(parts[0]), len(parts[1]), room)
        parts = [_cut(part, min(size, room), side) for part, size in zip(parts, sizes, strict=True)]
    between = zip(frame, [*parts, []], strict=True)
    second = len(frame[0]) + len(parts[0]) + len(frame[1]) if len(parts) == 2 else None
    return RenderedPrompt(list(chain.from_iterable(chain.from_iterable(between))), second=second)


def _cut(token_ids: Ids, keep: int, side: str) -> Ids:
    if len(token_ids) <= keep:
        return token_ids
    return token_ids[-keep:] if side == LEFT else token_ids[:keep]


def _sizes(first: int, second: int, room: int) -> list[int]:
    """Return the lengths of two texts after truncation to `room` tokens.

    The longer text is cut first, as in transformers' fast tokenizers."""
    if first + second <= room:
        return [first, second]
    short, long = min(first, second), max(first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return [long, short] if first > second else [short, long]

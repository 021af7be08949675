"""Log-probabilities in the formats of clients: completions, chats, and vLLM's prompt logprobs.

The chosen token comes first in a position's dictionary (`logprobs_of`). Its log-probability is the
same float in all lists of the response. Clients compare it with the maximum to see whether the
choice was greedy.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from quire.base.requests.outputs import Logprob, PromptLogprobs
from quire.render.tokens.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have

Position = dict[int, Logprob] | None


class TokenNames:
    """Names of tokens: their texts, or `token_id:N` if requested or if there is no text."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        pieces = None if tokenizer is None else tokenizer.pieces
        self._table = None if pieces is None else pieces.table

    def text(self, token_id: int, logprob: Logprob | None) -> str:
        """Return the name of a token. logprob: None for the first token of a prompt."""
        if self._tokenizer is not None:
            if logprob is None:
                return self._tokenizer.decode([token_id])
            if logprob.decoded_token is not None:
                return logprob.decoded_token
        return f"token_id:{token_id}"

    def bytes(self, token_id: int, text: str) -> list[int]:
        """Return the UTF-8 bytes of a token. A token that is part of a character has bytes, too."""
        piece = None if self._table is None else self._table[token_id]
        return list(piece if isinstance(piece, bytes) else text.encode())


class LegacyLogprobs:
    """Writer of the completions format, which has parallel lists. Text offsets continue from block
    to block. with_ids: also write the ids of the top tokens, under the same names."""

    def __init__(self, names: TokenNames, num_top: int, with_ids: bool = False) -> None:
        self._names = names
        self._num_top = num_top
        self._with_ids = with_ids
        self._offset = 0

    def block(self, token_ids: Sequence[int], positions: Iterable[Position]) -> dict[str, Any]:
        """Return the block of some tokens. A position without logprobs, such as the first of a
        prompt, shows null."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        ids: list[dict[str, int] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=False):
            found = None if position is None else position[token_id]
            text = self._names.text(token_id, found)
            tokens.append(text)
            chosen.append(None if found is None else shown(found))
            best = None if position is None else self._top(position)
            tops.append(None if best is None else {name: shown(best[name][1]) for name in best})
            ids.append(None if best is None else {name: best[name][0] for name in best})
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops,
            "text_offset": offsets,
            **({"top_token_ids": ids} if self._with_ids else {}),
        }

    def _top(self, position: dict[int, Logprob]) -> dict[str, tuple[int, Logprob]]:
        """Return the top tokens by name. If two tokens have the same text, the later one is named
        by its id."""
        found: dict[str, tuple[int, Logprob]] = {}
        for index, (token_id, logprob) in enumerate(position.items()):
            if index and not _is_top(logprob, self._num_top):
                continue
            text = self._names.text(token_id, logprob)
            found[f"token_id:{token_id}" if text in found else text] = token_id, logprob
        return found


def chat_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    positions: Iterable[dict[int, Logprob]],
    num_top: int,
) -> dict[str, Any]:
    """Return the chat format: one object per token, with the top tokens in order of rank. num_top:
    all of them if negative."""
    content, end = [], num_top if num_top >= 0 else None
    for token_id, position in zip(token_ids, positions, strict=False):
        best = sorted(position.items(), key=lambda item: item[1].rank or 0)[:end]
        entry = _entry(names, token_id, position[token_id])
        entry["top_logprobs"] = [_entry(names, *item) for item in best]
        content.append(entry)
    return {"content": content, "refusal": None}


def prompt_logprobs_json(positions: PromptLogprobs) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt logprobs: per position, a token id (as text) maps to its entry."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": shown(item),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token_id, item in position.items()
        }
        for position in positions
    ]


def shown(item: Logprob) -> float:
    return max(item.logprob, MIN_LOGPROB)


def _is_top(item: Logprob, num_top: int) -> bool:
    return num_top < 0 or (item.rank or 0) <= num_top


def _entry(names: TokenNames, token_id: int, item: Logprob) -> dict[str, Any]:
    text = names.text(token_id, item)
    return {"token": text, "logprob": shown(item), "bytes": names.bytes(token_id, text)}

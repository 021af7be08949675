"""Reader of a prompt that arrives in pieces (T 4.4.4).

Pieces become tokens as they arrive. The first tokens begin the request. Later tokens are appended
to it, and computed while the next piece is awaited. The end of the iterator completes the prompt.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.engine.client.fleet import CoreClient
from quire.render.media.parts import refuse_media
from quire.render.renderer import RenderedPrompt, Renderer
from quire.render.tokens.open_text import OpenText
from quire.serve.async_renderer import TextThreads

# Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Piece = str | Sequence[int] | Mapping[str, Any]


class PieceReader:
    """Reader with a task of its own for its `async with` block. The user's iterator may need this,
    since its resources may be bound to one task.

    error: the exception that ended reading early, from any source. is_complete: whether the
    iterator has ended. cache_salt: salt that arrived with the first tokens; later pieces cannot set
    another.
    """

    def __init__(
        self, pieces: AsyncIterable[Piece], renderer: Renderer, text_threads: TextThreads
    ) -> None:
        tokenizer = renderer.tokenizer
        self.error: BaseException | None = None
        self.is_complete = False
        self.cache_salt: str | None = None
        self._pieces = pieces
        self._renderer = renderer
        self._text_threads = text_threads
        self._open_text = None if tokenizer is None else OpenText(tokenizer)
        self._texts: list[str] | None = []  # None if only the token ids of some piece are known
        self._token_ids: list[int] = []  # tokens before the request was made
        self._changed = asyncio.Event()
        self._client: CoreClient | None = None
        self._request_id = ""

    async def __aenter__(self) -> "PieceReader":
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def first(self) -> RenderedPrompt:
        """Return the prompt so far, as soon as it has a token. Raises the iterator's exception, or
        RequestError for an invalid piece or if all pieces are empty."""
        await self._changed.wait()
        if self.error is not None:
            raise self.error
        return RenderedPrompt(self._token_ids, self.text)

    def follow(self, client: CoreClient, request_id: str) -> None:
        """Append all further tokens to this request. The caller must send it before the reader's
        task runs again. An error ends the request."""
        self._client, self._request_id = client, request_id

    @property
    def text(self) -> str | None:
        """The prompt so far as text; None if unknown."""
        if self._texts is None:
            return None
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    async def _read(self) -> None:
        try:
            try:
                async for piece in self._pieces:
                    self._put(await self._encode(piece))
                    await asyncio.sleep(0)  # let others run even if the iterator never waits
                self._put([] if self._open_text is None else self._open_text.close(), is_last=True)
            finally:
                if isinstance(self._pieces, AsyncGenerator):
                    await self._pieces.aclose()
        except BaseException as error:  # any exception, because the prompt's consumer waits
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    async def _encode(self, piece: object) -> list[int]:
        """Return the tokens that are certain after this piece."""
        text, token_ids = self._parts(piece)
        if isinstance(token_ids, Sequence) and not token_ids:
            return []
        if text is None:
            self._texts = None
        elif self._texts is not None:
            self._texts.append(text)
        if token_ids is not None:
            ids = self._renderer.render_prompt({"prompt_token_ids": token_ids})
            return ids if self._open_text is None else self._open_text.add_ids(ids)
        if self._open_text is None:
            return self._renderer.render_prompt(text)  # raises, since there is no tokenizer
        assert text is not None
        num_chars = len(text) + self._open_text.num_held_chars
        return await self._text_threads.run(num_chars, self._open_text.add, text)

    def _parts(self, piece: object) -> tuple[str | None, object | None]:
        """Return text and token ids of a piece; if it has both, the ids count."""
        if isinstance(piece, str):
            return piece, None
        if isinstance(piece, Mapping):
            refuse_media(piece, "a prompt in pieces")
            self._check_salt(piece.get("cache_salt"))
            text, token_ids = piece.get("prompt"), piece.get("prompt_token_ids")
            if token_ids is not None or isinstance(text, str):
                return text if isinstance(text, str) else None, token_ids
        elif isinstance(piece, Sequence) and not (piece and isinstance(piece[0], Mapping)):
            return None, piece
        raise RequestError(
            'a part of an open prompt must be a text, token ids, {"prompt": text} or'
            f' {{"prompt_token_ids": ids}}, got {type(piece).__name__}.'
        )

    def _check_salt(self, salt: str | None) -> None:
        """Reject a late salt. The engine needs it with the first tokens, before any block is
        cached."""
        if not salt or salt == self.cache_salt:
            return
        if self._changed.is_set() or self.cache_salt is not None:
            message = "cache_salt must come with the first part of the prompt, and stay the same."
            raise RequestError(message, "cache_salt")
        self.cache_salt = salt

    def _put(self, token_ids: list[int], is_last: bool = False) -> None:
        if self._client is not None:
            if token_ids or is_last:
                self._client.append(self._request_id, token_ids, is_last)
            return
        self._token_ids += token_ids
        self.is_complete = is_last
        if self._token_ids:
            self._changed.set()
        elif is_last:
            raise RequestError("the prompt is empty: it gives no tokens.", "prompt")

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._changed.set()
        if self._client is not None:
            self._client.fail(self._request_id, error)

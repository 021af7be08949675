"""`Tokenizer`: converts text to token ids and back, from a model directory or a GGUF file.

A thin layer over the `tokenizers` library. It adds the settings of the files next to
tokenizer.json: special tokens, begin and end tokens, chat templates. Its ids equal the ids of
transformers' fast tokenizer. `tokenizers` is imported when the first tokenizer is loaded.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import RequestError
from quire.render.tokens.cuts import PART_CHARS, Cuts, read_cuts
from quire.render.tokens.gguf_tokenizer import gguf_tokenizer
from quire.render.tokens.known_parts import KnownParts
from quire.render.tokens.piece_tables import read_pieces
from quire.render.tokens.pieces import Pieces
from quire.render.tokens.text_bound import TextBound, text_bound
from quire.render.tokens.tokenizer_backend import finish_backend, load_backend, state_of
from quire.render.tokens.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TokenizerFiles,
    read_tokenizer_files,
)
from quire.spec.gguf.container import GGUFFile, is_gguf

if TYPE_CHECKING:
    import tokenizers


def is_mark(text: str, is_special: bool) -> bool:
    """Return whether an added token is a mark such as `<tool_call>`, not an ordinary text."""
    return is_special or (text.startswith("<") and text.endswith(">"))


class Tokenizer:
    """One vocabulary. Threads may share it."""

    def __init__(self, backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
        self._backend = backend
        self._files = files
        self._known = KnownParts()
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def added_ids(self) -> dict[str, int]:
        """Return the ids of added tokens that are marks, by their texts.

        Other added tokens are words, which grammars treat as ordinary tokens."""
        return {
            text: token_id
            for token_id, text in self.added_tokens.items()
            if is_mark(text, token_id in self.special_ids)
        }

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Load tokenizer.json, vocab.json with merges.txt, another vocabulary (converted.py), or a
        GGUF file's.

        Raises ModelError if there is none, and MissingDependency for a conversion without its
        packages."""
        if is_gguf(path):
            backend, files = gguf_tokenizer(GGUFFile(path))
            finish_backend(backend, files)
            return cls(backend, files)
        files = read_tokenizer_files(path)
        return cls(load_backend(files), files)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with begin and end tokens as the files configure them.

        Releases the GIL: of the library's calls, only those for batches do. A long text is
        tokenized in parts if that gives the same ids, and known parts are not tokenized again.
        Raises RequestError for invalid Unicode.
        """
        if len(text) <= 2 * PART_CHARS or self._cuts is None:
            return self._encode(text, add_special_tokens)
        before, after = self._around if add_special_tokens else ([], [])
        *parts, last = self._cuts.parts(text)
        token_ids = list(before)
        for part in parts:
            token_ids += self._part(part)
        return token_ids + self._encode(last, False) + after

    def num_new_chars(self, text: str) -> int:
        """Return how many characters of a text are in no known part, so that `encode` tokenizes
        them."""
        if len(text) <= 2 * PART_CHARS or self._cuts is None:
            return len(text)
        *parts, last = self._cuts.parts(text)
        return len(last) + sum([len(part) for part in parts if part not in self._known])

    def _part(self, part: str) -> list[int]:
        known = self._known.find(part)
        if known is None:
            known = self._encode(part, False)
            self._known.add(part, known)
        return known

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise RequestError(
                f"the prompt cannot be tokenised ({error}); it must be a text of valid Unicode."
            ) from error
        return found.ids

    @cached_property
    def _cuts(self) -> Cuts | None:
        return read_cuts(self._backend)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a text."""
        whole, text = self._encode("a", True), self._encode("a", False)
        start = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        return whole[:start], whole[start + len(text) :]

    def frame(self, num_parts: int) -> list[list[int]]:
        """Return the special tokens around one text or a pair of texts.

        The lists hold the tokens before the first text, between the texts, and after the last."""
        if num_parts == 1:
            return [list(part) for part in self._around]
        text = self._encode("a", False)
        [pair] = self._backend.encode_batch_fast([("a", "a")], add_special_tokens=True)
        rest, found = pair.ids, list[list[int]]()
        for _ in range(2):
            start = next(i for i in range(len(rest)) if rest[i : i + len(text)] == text)
            found.append(rest[:start])
            rest = rest[start + len(text) :]
        return [*found, rest]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of all ids at once, and release the GIL. Unknown ids give no text."""
        return self._backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )[0]

    @cached_property
    def bound(self) -> TextBound | None:
        """The lower bound on a text's tokens, to reject long texts cheaply; None without one."""
        return text_bound(self._backend)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it; None outside of the vocabulary."""
        return self._backend.id_to_token(token_id)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens of several ids, with an empty string for unknown ids."""
        return [self.token(token_id) or "" for token_id in token_ids]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling; None if there is none."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """Return the tokenizer as tokenizer.json, including the settings of other files."""
        return self._backend.to_str()

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens with added ones. The model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def named_tokens(self) -> dict[str, str]:
        """The texts of bos_token, eos_token and so on, as chat templates refer to them."""
        return self._files.named_tokens

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name."""
        return self._files.chat_templates

    @property
    def chat_template(self) -> str | None:
        """The text of the default chat template; None if there is none."""
        return self._files.chat_templates.get(DEFAULT_TEMPLATE)

    @cached_property
    def pieces(self) -> Pieces | None:
        """The table of each token's text; None if the decoder needs context."""
        return read_pieces(state_of(self._backend.decoder), self.token)

    def _named_id(self, name: str) -> int | None:
        text = self._files.named_tokens.get(name)
        return None if text is None else self.token_id(text)

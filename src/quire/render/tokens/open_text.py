"""Tokens of a text that comes in pieces, as soon as they are certain.

What follows the last blank is held back until more of the text is there, with the blank before it:
tokenizers of language models do not join a word with the blank that follows it, so the tokens of
what was given out are those of the whole text. Pieces of token ids may come between.
"""

import re

from quire.render.tokens.tokenizer import Tokenizer

# Up to the last place where a word may begin, with the blank before it. A new line counts only
# behind a letter or digit: punctuation may be one token with it.
TO_LAST_WORD = re.compile(r".*(?:(?<=\S)(?= )|(?<=[^\W_])(?=\n))", re.DOTALL)
# A word that stands before what continues a text, so that no tokenizer takes it for a beginning;
# its tokens are taken off again.
ANCHOR = "a"


class OpenText:
    """One prompt in pieces. Not thread-safe, but its calls may be made in different threads.

    adds_special: whether a text at the beginning gets what the tokenizer puts before a text (begin
    of sequence), and a text at the end what it puts behind.
    """

    def __init__(self, tokenizer: Tokenizer, adds_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._adds_special = adds_special
        self._held: list[str] = []
        self._num_held_chars = 0
        self._is_begun = False
        self._follows_text = False
        self._behind: list[int] = []  # special tokens at the end, if that is a text
        self._added_tokens = tuple(tokenizer.added_tokens.values())
        self._anchor_ids = tokenizer.encode(ANCHOR, add_special_tokens=False)

    @property
    def num_held_chars(self) -> int:
        return self._num_held_chars

    def add(self, piece: str) -> list[int]:
        """Return the tokens that this piece makes certain. Raises RequestError for text that is
        none."""
        text = piece
        if " " in piece or "\n" in piece:
            text = "".join([*self._held, piece])
            self._held, self._num_held_chars = [], 0
        end = self._last_boundary(text)
        if end < len(text):
            self._held.append(text[end:])
            self._num_held_chars += len(text) - end
        return self._encode(text[:end])

    def flush(self) -> list[int]:
        """Return the tokens of what is held back: token ids follow."""
        text = "".join(self._held)
        self._held, self._num_held_chars = [], 0
        return self._encode(text)

    def add_ids(self, token_ids: list[int]) -> list[int]:
        """Return what was held back, and these behind it."""
        before = self.flush()
        if token_ids:
            self._is_begun, self._follows_text = True, False
        return before + token_ids

    def close(self) -> list[int]:
        """Return the last tokens."""
        last = self.flush()
        return last + self._behind if self._follows_text else last

    def _last_boundary(self, text: str) -> int:
        """Return where the last word begins; 0 if there is no such place. None is behind an added
        token, which may take in the blank that follows it."""
        end = len(text)
        while found := TO_LAST_WORD.match(text, 0, end):
            end = found.end()
            if not text.endswith(self._added_tokens, 0, end):
                return end
        return 0

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        encode = self._tokenizer.encode
        if self._follows_text:
            token_ids = encode(ANCHOR + text, add_special_tokens=False)
            num = len(self._anchor_ids)
            return token_ids[num:] if token_ids[:num] == self._anchor_ids else encode(text, False)
        token_ids = encode(text, add_special_tokens=False)
        if not self._is_begun and self._adds_special:
            before, self._behind = self._special_tokens()
            token_ids = before + token_ids
        self._is_begun = self._follows_text = True
        return token_ids

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return what the tokenizer puts before a text and behind it."""
        whole, num = self._tokenizer.encode(ANCHOR), len(self._anchor_ids)
        for start in range(len(whole) - num + 1):
            if whole[start : start + num] == self._anchor_ids:
                return whole[:start], whole[start + num :]
        return [], []

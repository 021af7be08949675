"""Tokenize a prompt that arrives in pieces, and return tokens as soon as they are certain.

The last word, with the blank before it, is held back until more text arrives. Language models'
tokenizers never join a word with the blank after it. So the returned tokens are the tokens of the
whole text. Pieces of token ids may come in between.
"""

import re

from quire.render.tokens.tokenizer import Tokenizer

# Text up to the last place where a word may begin: before a blank. A line break counts only after a
# letter or digit, because punctuation may form one token with it.
TO_LAST_WORD = re.compile(r".*(?:(?<=\S)(?= )|(?<=[^\W_])(?=\n))", re.DOTALL)
# Precedes a text that continues another, so that the tokenizer sees no beginning; its tokens are
# removed again.
ANCHOR = "a"


class OpenText:
    """One prompt in pieces. Calls may come from different threads, but not at the same time.

    adds_special: whether a text at the start gets the begin token, and a text at the end the end
    token, if the tokenizer adds them.
    """

    def __init__(self, tokenizer: Tokenizer, adds_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._adds_special = adds_special
        self._held: list[str] = []
        self._num_held_chars = 0
        self._is_begun = False
        self._follows_text = False
        self._after: list[int] = []  # special tokens after the prompt, if it ends with a text
        self._added_tokens = tuple(tokenizer.added_tokens.values())
        self._anchor_ids = tokenizer.encode(ANCHOR, add_special_tokens=False)

    @property
    def num_held_chars(self) -> int:
        return self._num_held_chars

    def add(self, piece: str) -> list[int]:
        """Return the tokens that this piece makes certain. Raises RequestError for invalid text."""
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
        """Return the tokens of the held text, because no text follows."""
        text = "".join(self._held)
        self._held, self._num_held_chars = [], 0
        return self._encode(text)

    def add_ids(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of the held text, followed by `token_ids`."""
        before = self.flush()
        if token_ids:
            self._is_begun, self._follows_text = True, False
        return before + token_ids

    def close(self) -> list[int]:
        """Return the last tokens of the prompt."""
        last = self.flush()
        return last + self._after if self._follows_text else last

    def _last_boundary(self, text: str) -> int:
        """Return the start of the last word; 0 if there is none.

        A place after an added token does not count, because the token may absorb the next blank."""
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
            before, self._after = self._special_tokens()
            token_ids = before + token_ids
        self._is_begun = self._follows_text = True
        return token_ids

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before and after a text."""
        whole, num = self._tokenizer.encode(ANCHOR), len(self._anchor_ids)
        for start in range(len(whole) - num + 1):
            if whole[start : start + num] == self._anchor_ids:
                return whole[:start], whole[start + num :]
        return [], []

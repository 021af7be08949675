"""Match texts against grammars in tests, byte by byte, with llguidance."""

from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

# The byte tokenizer has special tokens from 256 on.
ADDED = {"<|tool|>": 256, "<|/tool|>": 257, "<|user|>": 258, "<|system|>": 259}


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def takes(grammar: str, text: str | bytes | list[int]) -> bool:
    """Return whether the grammar accepts the whole text. A list may hold ids of ADDED."""
    if isinstance(text, list):
        token_ids = text
    else:
        token_ids = list(text.encode() if isinstance(text, str) else text)
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def with_tokens(*parts: str) -> list[int]:
    """Return the bytes of texts, and the ids of added tokens."""
    found: list[int] = []
    for part in parts:
        found += [ADDED[part]] if part in ADDED else list(part.encode())
    return found

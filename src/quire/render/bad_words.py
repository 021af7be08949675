"""The token sequences that `bad_words` forbids."""

from collections.abc import Sequence

from quire.render.tokenizer import Tokenizer


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return each word as it is tokenised at the start of a text and behind a space.

    The form with a space counts only where it is as long and begins with another token:
    otherwise it is the same word, or the space is a token by itself that must stay allowed.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip()
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
        if plain:
            found.append(plain)
        if spaced and (not plain or (len(spaced) == len(plain) and spaced[0] != plain[0])):
            found.append(spaced)
    return tuple(dict.fromkeys(found))

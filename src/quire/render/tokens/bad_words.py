"""Token sequences for `bad_words`, and the tokens that break DRY's repetitions."""

from collections.abc import Sequence

from quire.base.requests.sampling_params import DRY_BREAKERS, SamplingParams
from quire.render.tokens.tokenizer import Tokenizer


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the start of a text and after a space.

    The form with a space is omitted if it ends with the tokens of the form without: the shorter one
    already forbids it. (vLLM also omits it if the forms differ in length. Then a word that is one
    token after a space, but several without, is not forbidden.)
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip()
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
        if plain:
            found.append(plain)
        if spaced and (not plain or spaced[-len(plain) :] != plain):
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def breaker_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that break a repetition, without duplicates.

    These are the breakers given as tokens, and the last token of each breaker text, alone and after
    a letter, as in text-generation-webui."""
    breakers, found = params.dry_sequence_breakers, list(params.dry_breaker_token_ids or ())
    for text in DRY_BREAKERS if breakers is None else breakers:
        for around in (text, "a" + text):
            found += tokenizer.encode(around, add_special_tokens=False)[-1:]
    return list(dict.fromkeys(found))

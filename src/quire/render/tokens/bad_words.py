"""Token sequences that `bad_words` forbids, and tokens at which DRY's repetitions end."""

from collections.abc import Sequence

from quire.base.requests.sampling_params import DRY_BREAKERS, SamplingParams
from quire.render.tokens.tokenizer import Tokenizer


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return each word as it is tokenised at the start of a text and behind a space.

    Where the form with a space is a token for the space and then the word's, it is left out: it
    cannot come without the word. (vLLM also leaves it out where the two forms differ in length, and
    so lets a word come that is one token behind a space and several without one.)
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
    """Return the last token of each breaker, alone and behind a letter (as text-generation-webui
    has it), and those that are given as tokens."""
    breakers, found = params.dry_sequence_breakers, list(params.dry_breaker_token_ids or ())
    for text in DRY_BREAKERS if breakers is None else breakers:
        for around in (text, "a" + text):
            found += tokenizer.encode(around, add_special_tokens=False)[-1:]
    return list(dict.fromkeys(found))

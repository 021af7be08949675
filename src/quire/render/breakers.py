"""The tokens at which DRY's repetitions end."""

from quire.base.sampling_params import DRY_BREAKERS, SamplingParams
from quire.render.tokenizer import Tokenizer


def breaker_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[int]:
    """Return the last token of each breaker, alone and behind a letter (as text-generation-webui
    has it), and those that are given as tokens."""
    breakers, found = params.dry_sequence_breakers, list(params.dry_breaker_token_ids or ())
    for text in DRY_BREAKERS if breakers is None else breakers:
        for around in (text, "a" + text):
            found += tokenizer.encode(around, add_special_tokens=False)[-1:]
    return list(dict.fromkeys(found))

"""From rendered prompts and parameters to requests: ids, seeds, the tokens that end a sequence."""

import hashlib

from quire.base.errors import RequestError
from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.structured_outputs import FIELD
from quire.base.settings.kv_transfer import FIELD as FIELD_OF_TRANSFER
from quire.base.settings.kv_transfer import transfer_of
from quire.render.generation import GenerationDefaults
from quire.render.grammars.structured import no_tokenizer
from quire.render.renderer import RenderedPrompt
from quire.render.tokens.bad_words import bad_words_token_ids, breaker_ids
from quire.render.tokens.tokenizer import Tokenizer

MAKER_STRIDE = 1 << 40  # requests of one maker


class TextRequestMaker:
    """Makes requests for generated text, of one engine (see `RequestMaker` for the others).

    engine_seed, maker_id: requests without a seed get one from these and their running number.
    stream_interval: that of all requests at least.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        engine_seed: int,
        maker_id: int = 0,
        stream_interval: int = 1,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._engine_seed = engine_seed
        self._stream_interval = stream_interval
        self._count = maker_id * MAKER_STRIDE

    def make(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        timeout_s: float = 0.0,
        grammar: str = "",
    ) -> Request:
        """Make a request. best_of needs logprobs, requested or not. request_id: unique; a running
        number if absent. grammar: checked grammar of the answer (`checked_grammar`). An end
        token always ends such an answer, since the grammar may allow nothing else. Raise
        RequestError for parameters that mean text where there is no tokenizer."""
        if prompt.media and params.use_beam_search:
            raise RequestError(
                "beam search does not accept images or videos; set use_beam_search to false.",
                "use_beam_search",
            )
        number, self._count = self._count, self._count + 1
        own = tuple(params.stop_token_ids or ())
        bad: tuple[tuple[int, ...], ...] = ()
        if self.tokenizer is None:
            _check_textless(params, grammar)
        elif params.bad_words:
            bad = bad_words_token_ids(params.bad_words, self.tokenizer)
        if params.structured_outputs is not None:
            assert grammar, "structured_outputs: pass checked_grammar of them"
            params = params.clone()
            params.structured_outputs = None
        kv_transfer = None
        if params.extra_args is not None:
            kv_transfer = transfer_of(params.extra_args.get(FIELD_OF_TRANSFER))
            params = params.clone()
            params.extra_args = None
        eos = () if params.ignore_eos and not grammar else self.defaults.eos_token_ids
        if params.has_dry and self.tokenizer is not None:
            params = params.clone()
            params.dry_breaker_token_ids = breaker_ids(params, self.tokenizer)
        if self._stream_interval > (params.stream_interval or 1):
            params = params.clone()
            params.stream_interval = self._stream_interval
        needs_logprobs = params.is_ranked and not params.use_beam_search
        hides_logprobs = needs_logprobs and params.logprobs is None
        if hides_logprobs:
            params = params.clone()
            params.logprobs = 0
        return Request(
            request_id=str(number) if request_id is None else request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=derive_seed(self._engine_seed, number) if params.seed is None else params.seed,
            stop_token_ids=tuple(dict.fromkeys(eos + own)),
            eos_token_ids=tuple(token_id for token_id in eos if token_id not in own),
            bad_words_token_ids=bad,
            priority=priority,
            cache_salt=cache_salt,
            hides_logprobs=hides_logprobs,
            tenant=tenant,
            timeout_s=timeout_s,
            grammar=grammar,
            kv_transfer=kv_transfer,
            media=prompt.media,
        )


def _check_textless(params: SamplingParams, grammar: str) -> None:
    if params.structured_outputs is not None or grammar:
        raise no_tokenizer(FIELD)
    for name in ("stop", "bad_words", "dry_sequence_breakers"):
        if value := getattr(params, name):
            raise RequestError(
                f"{name}={value!r} needs a tokenizer, which this model does not have; use"
                " stop_token_ids or logit_bias.",
                name,
            )


def derive_seed(engine_seed: int, number: int) -> int:
    """Return the 64-bit signed seed of a request that brings none: the same in every run."""
    digest = hashlib.sha256(f"quire-seed {engine_seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)

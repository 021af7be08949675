"""The client: requests in tokens go to a core, `RequestOutput`s come back (seeds C4).

`InProcessClient` shares the caller's thread with its core; clients that reach a core in another
process have the same methods.
"""

import hashlib
from collections.abc import Iterable

from quire.base.clock import Clock
from quire.base.errors import RequestError
from quire.base.messages import Abort, Request, ResetPrefixCache
from quire.base.outputs import RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.engine.core import EngineCore
from quire.engine.output import OutputProcessor
from quire.render.bad_words import bad_words_token_ids
from quire.render.generation import GenerationDefaults
from quire.render.renderer import RenderedPrompt
from quire.render.tokenizer import Tokenizer


class RequestMaker:
    """Makes requests from prompts and parameters: ids, seeds, the tokens that end a sequence."""

    def __init__(
        self, tokenizer: Tokenizer | None, defaults: GenerationDefaults, engine_seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._engine_seed = engine_seed
        self._count = 0

    def make(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Request:
        """request_id: unique; a running number if absent. Raises RequestError for parameters that
        mean text where there is no tokenizer."""
        number, self._count = self._count, self._count + 1
        eos = () if params.ignore_eos else self.defaults.eos_token_ids
        own = tuple(params.stop_token_ids or ())
        bad: tuple[tuple[int, ...], ...] = ()
        if self.tokenizer is None:
            _check_textless(params)
        elif params.bad_words:
            bad = bad_words_token_ids(params.bad_words, self.tokenizer)
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
        )


def _check_textless(params: SamplingParams) -> None:
    for name, value in (("stop", params.stop), ("bad_words", params.bad_words)):
        if value:
            raise RequestError(
                f"{name}={value!r} needs a tokenizer, which this model does not have; use"
                " stop_token_ids or logit_bias."
            )


def derive_seed(engine_seed: int, number: int) -> int:
    """The 64-bit signed seed of a request that brings none: the same in every run."""
    digest = hashlib.sha256(f"quire-seed {engine_seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class InProcessClient:
    """A core of one's own, without processes or sockets."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None, clock: Clock) -> None:
        self.core = core
        self._tokenizer = tokenizer
        self._clock = clock
        self._outputs = OutputProcessor()

    @property
    def num_unfinished(self) -> int:
        return len(self._outputs)

    def check(self, request: Request) -> None:
        """Raise RequestError if the engine can never serve this request."""
        self.core.limits.check(request)

    def add(self, request: Request, prompt_text: str | None = None) -> None:
        """Queue a request. Raises RequestError if it cannot be served; then nothing is queued."""
        self.core.add(request)
        self._outputs.add(
            request.request_id,
            prompt_text,
            request.prompt_token_ids,
            request.params,
            self._tokenizer,
            self._clock.now(),
        )

    def step(self) -> list[RequestOutput]:
        """Let the core take one step; what became ready to show."""
        ready, aborts = self._outputs.process(self.core.step(), self._clock.now())
        for abort in aborts:
            self.core.control(abort)
        return ready

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now; their outputs so far."""
        ids = list(request_ids)
        for request_id in ids:
            self.core.control(Abort(request_id))
        return self._outputs.abort(ids, self._clock.now())

    def reset_prefix_cache(self) -> None:
        self.core.control(ResetPrefixCache())

    def close(self) -> None:
        self.core.close()

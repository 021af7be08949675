"""Base of sessions: their tokens, and the retained request that has computed the first of them. If
the retained request has been dropped, the engine computes its tokens again."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from quire.base.errors import STEP_FAILED, RequestError, StepFailed
from quire.base.messages import Fork, Request
from quire.base.requests.outputs import CompletionOutput
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.client.admission import Checks, admit
from quire.engine.client.request_maker import RequestMaker
from quire.render.renderer import RenderedPrompt, Renderer
from quire.render.templates.turns import text_after

KEEP_S = 600.0


@dataclass(eq=False, slots=True)
class Source:
    """A retained request, shared by all sessions that begin with its tokens."""

    request_id: str
    core_id: int | None
    num_users: int = 0  # number of these sessions


class SessionTokens:
    """Tokens of a session, both given and generated. keep_s: seconds for which blocks are retained
    after each answer."""

    def __init__(
        self, requests: RequestMaker, renderer: Renderer, keep_s: float, cache_salt: str
    ) -> None:
        self.token_ids: list[int] = []
        self._requests, self._renderer = requests, renderer
        self._keep_s, self._salt = keep_s, cache_salt
        self._source: Source | None = None
        self._num_shared = 0  # leading tokens that the source has

    def fork(self, at_token: int | None = None) -> Self:
        """Return another session with the first at_token tokens; with all tokens if absent."""
        num_tokens = len(self.token_ids)
        at_token = num_tokens if at_token is None else at_token
        if not 0 <= at_token <= num_tokens:
            raise RequestError(
                f"at_token must be from 0 to {num_tokens}, the number of tokens; got {at_token}."
            )
        child = copy.copy(self)
        child.token_ids = self.token_ids[:at_token]
        child._begin_with(self._source, self._num_shared)
        return child

    def rewind(self, num_tokens: int) -> Self:
        """Drop the last num_tokens tokens."""
        if not 0 <= num_tokens <= len(self.token_ids):
            raise RequestError(
                f"num_tokens must be from 0 to {len(self.token_ids)}, the number of tokens; got"
                f" {num_tokens}."
            )
        self._replace(self.token_ids[: len(self.token_ids) - num_tokens])
        self._num_shared = min(self._num_shared, len(self.token_ids))
        return self

    # ---- for subclasses ----------------------------------------------------------------------

    def _replace(self, token_ids: list[int]) -> None:
        """Replace the session's tokens."""
        self.token_ids = token_ids

    def _params(self, given: SamplingParams | None) -> SamplingParams:
        """Return a copy of the parameters. Raises RequestError if the session is empty."""
        params = (given or self._requests.defaults.default_sampling_params()).clone()
        if params.num_samples > 1:
            name = params.width_field
            raise RequestError(f"{name} must be 1 in a session; call fork() to branch.", name)
        if not self.token_ids:
            raise RequestError("the session has no tokens yet; append some.", "prompt")
        return params

    def _request(self, client: Checks, params: SamplingParams, grammar: str) -> Request:
        """Return the request that continues the tokens. Raises RequestError."""
        made = self._requests.make(
            RenderedPrompt(self.token_ids), params, cache_salt=self._salt, grammar=grammar
        )
        if self._source is None or not self._num_shared:
            return admit(client, made, keep_s=self._keep_s)
        fork = Fork(self._source.request_id, 0, self._num_shared)
        return admit(client, made, keep_s=self._keep_s, fork=fork, core_id=self._source.core_id)

    def _check_salt(self, prompt: object) -> None:
        """Raise RequestError for a prompt with a cache_salt other than the session's."""
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if salt not in (None, "", self._salt):
            raise RequestError(
                "cache_salt belongs to the whole session; give it to session().", "cache_salt"
            )

    def _tail_of(self, rendered: str, mark: str) -> str:
        """Return what follows the mark for the last answer in a rendered conversation."""
        tokenizer = self._renderer.tokenizer
        assert tokenizer is not None, "a conversation was rendered before"
        has_ended = self.token_ids[-1] in self._requests.defaults.eos_token_ids
        end = tokenizer.decode(self.token_ids[-1:]) if has_ended else ""
        return text_after(rendered, mark, end)

    def _begin_with(self, source: Source | None, num_shared: int) -> None:
        """Share the first tokens of a source, or of none. The previous source is not released."""
        num_shared = min(num_shared, len(self.token_ids))
        self._source, self._num_shared = None, 0
        if source is not None and num_shared:
            source.num_users += 1
            self._source, self._num_shared = source, num_shared

    def _detach(self) -> Source | None:
        """Detach from the source. Return it if it has no other users, to be released."""
        source, self._source, self._num_shared = self._source, None, 0
        if source is None:
            return None
        source.num_users -= 1
        return None if source.num_users else source


def check_answer(completion: CompletionOutput) -> None:
    """Raise the error of a failed answer: RequestError, or StepFailed if a step failed on it."""
    failed = completion.error
    if failed is not None:
        raise (StepFailed if failed.code == STEP_FAILED else RequestError)(failed.message)

"""Validation of requests: the same code in the client, who shows the error, and in the core."""

from dataclasses import dataclass

from quire.base.errors import RequestError
from quire.base.messages import Request

MAX_CACHE_SALT = 1024
MAX_STOP_TOKEN_IDS = 1024


@dataclass(frozen=True)
class RequestLimits:
    """What an engine can serve. max_logprobs -1 is no limit."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int

    def check(self, request: Request) -> None:
        """Raise RequestError for what this engine can never serve."""
        check_request(request, self.vocab_size, self.max_model_len, self.max_logprobs)


def check_request(request: Request, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
    """Raise RequestError for a request outside of these limits."""
    params, prompt = request.params, request.prompt_token_ids
    if params.n != 1 or params.best_of not in (None, 1):
        raise RequestError(
            f"n={params.n}, best_of={params.best_of}: one continuation per request is possible for"
            " now; send the prompt n times with different seeds."
        )
    if not 1 <= len(prompt) < max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; at least 1 and at most max_model_len - 1 ="
            f" {max_model_len - 1} are possible. Shorten it or raise max_model_len."
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"prompt token id {wrong} is not in the vocabulary of {vocab_size}.")
    params.check_vocab(vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, getattr(params, name), max_logprobs)
    if len(request.cache_salt) > MAX_CACHE_SALT:
        raise RequestError(f"cache_salt is longer than {MAX_CACHE_SALT} characters.")
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"more than {MAX_STOP_TOKEN_IDS} stop token ids.")


def _check_logprobs(name: str, value: int | None, most: int) -> None:
    if value is None or most == -1:
        return
    if value == -1 or value > most:
        raise RequestError(
            f"{name}={value} is more than max_logprobs={most}; ask for fewer or raise max_logprobs."
        )

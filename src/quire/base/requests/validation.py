"""Validation of requests, shared by the client, which reports errors early, and the core."""

import math
from array import array
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.base.clock import MAX_DURATION_S, duration_rule
from quire.base.errors import CONTEXT_LENGTH_EXCEEDED, WRONG_RUNNER, RequestError
from quire.base.messages import Draft, Request
from quire.base.requests.pooling import plain_id
from quire.base.requests.retention import check_open, check_pin, check_retainable
from quire.base.requests.sampling_params import SamplingParams, processor_name

PROMPT = "prompt"  # field that errors name, whatever its name in the API
MAX_LENGTHS = {"cache_salt": 1024, "stop_token_ids": 1024, "tenant": 256}
INT32 = 2**31


@dataclass(frozen=True)
class RequestLimits:
    """Limits and features of an engine that requests must respect."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int  # -1: no limit
    max_num_seqs: int  # rows; a request with more sequences could never run as a whole
    logits_processors: tuple[str, ...] = ()  # names of processors that requests may use
    takes_functions: bool = True  # whether requests may contain Python functions as processors
    pools: bool = False  # whether all requests must pool; else none may
    has_text_pairs: bool = False  # see `PoolingSpec`
    takes_grammars: bool = False  # whether requests may have a constraint

    def known_part(self, draft: Draft) -> Draft:
        """Return a draft up to its first token id outside of the vocabulary."""
        draft_ids, size = draft.token_ids, self.vocab_size
        if min(draft_ids, default=0) >= 0 and max(draft_ids, default=0) < size:
            return draft
        num = next(i for i, token_id in enumerate(draft_ids) if not 0 <= token_id < size)
        return msgspec.structs.replace(draft, token_ids=draft_ids[:num])

    def check(self, request: Request, num_known: int = 0) -> None:
        """Raise RequestError if this engine can never serve the request.

        num_known: leading prompt tokens that are already known to be in the vocabulary."""
        params = request.params
        params.check_samples()
        self._check_kind(request)
        if request.grammar and not self.takes_grammars:
            raise RequestError(
                "structured output is disabled on this engine; remove response_format or"
                " structured_outputs.", "structured_outputs",
            )  # fmt: skip
        if request.is_open:
            check_open(params)
        if request.pin_s is not None:
            check_pin(request)
        if request.keep_s or request.fork is not None:
            check_retainable(request, request.keep_s)
        name = params.width_field
        if params.num_samples > self.max_num_seqs:
            raise RequestError(
                f"{name}={params.num_samples} is more than max_num_seqs={self.max_num_seqs};"
                " request fewer or raise max_num_seqs.",
                name,
            )
        self._check_prompt(request.prompt_token_ids, num_known)
        params.check_vocab(self.vocab_size)
        _check_named_in_prompt(request)
        if params.use_beam_search:
            self._check_beams(request)
        self._check_processors(params)
        for name in ("logprobs", "prompt_logprobs"):
            value, limit = getattr(params, name), self.max_logprobs
            if value is not None and limit != -1 and not 0 <= value <= limit:
                rule = f"more than max_logprobs={limit}; request fewer or raise max_logprobs."
                raise RequestError(f"{name}={value} is {rule}", name)
        for name, limit in MAX_LENGTHS.items():
            if (length := len(getattr(request, name))) > limit:
                rule = f"at most {limit} is possible. Shorten it."
                raise RequestError(f"{name} has a length of {length}; {rule}", name)
        if not -INT32 <= request.priority < INT32:
            message = f"priority must be an integer of 32 bits, got {request.priority}."
            raise RequestError(message, "priority")
        if not 0.0 <= request.timeout_s <= MAX_DURATION_S:  # also for NaN
            rule = duration_rule("for none")
            message = f"timeout_s must be {rule}, got {request.timeout_s!r}."
            raise RequestError(message, "timeout_s")
        if not 0 <= request.received_s < math.inf:
            rule = "a time of this machine's monotonic clock, or 0 if unknown"
            message = f"received_s must be {rule}, got {request.received_s!r}."
            raise RequestError(message, "received_s")

    def _check_kind(self, request: Request) -> None:
        if request.pools and not self.pools:
            raise RequestError(
                "this engine generates text, and returns no embeddings, scores or classes. Start an"
                " engine with a pooling model, or with runner='pooling' (--runner pooling).",
                code=WRONG_RUNNER,
            )
        if self.pools and not request.pools:
            raise gives_no_text()

    def check_piece(self, token_ids: list[int], num_before: int) -> None:
        """Raise RequestError if these tokens cannot be appended to a prompt of num_before
        tokens."""
        if token_ids:
            check_vocabulary(token_ids, self.vocab_size)
        if num_before + len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt would grow to {num_before + len(token_ids)} tokens; the maximum is"
                f" max_model_len - 1 = {self.max_model_len - 1}. Send fewer tokens or raise"
                " max_model_len.",
                PROMPT,
                CONTEXT_LENGTH_EXCEEDED,
            )

    def _check_processors(self, params: SamplingParams) -> None:
        for processor in params.logits_processors or ():
            name, field = processor_name(processor), "logits_processors"
            if name is None and not self.takes_functions:
                raise RequestError(
                    "a Python function cannot be sent to an engine in another process; install it"
                    " as a package, and give its name (docs/extend/README.md).", field,
                )  # fmt: skip
            if name is not None and name not in self.logits_processors:
                known = ", ".join(self.logits_processors) or "none"
                raise RequestError(
                    f"there is no logits processor {name!r}; the setting logits_processors of the"
                    f" engine allows: {known}.", field,
                )  # fmt: skip

    def _check_beams(self, request: Request) -> None:
        """Check that the vocabulary has enough tokens to continue all beams with different tokens,
        even if no stop token counts."""
        stops = {token for token in request.stop_token_ids if token < self.vocab_size}
        num_others, num_beams = self.vocab_size - len(stops), request.params.num_samples
        if num_beams > num_others:
            name = request.params.width_field
            raise RequestError(
                f"{name}={num_beams} is more than the {num_others} tokens of the vocabulary that"
                " do not stop a beam; request fewer beams or give fewer stop_token_ids.",
                name,
            )

    def _check_prompt(self, prompt: list[int], num_known: int) -> None:
        limit, name, otherwise = (
            self.max_model_len - 1,
            "max_model_len - 1",
            " or raise max_model_len",
        )
        if self.pools:
            limit, name = self.max_model_len, "max_model_len"
            otherwise = ", or truncate it with truncate_prompt_tokens=-1"
        if not 1 <= len(prompt) <= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the range is 1 to {name} = {limit}. Shorten"
                f" it{otherwise}.",
                PROMPT,
                CONTEXT_LENGTH_EXCEEDED if prompt else None,
            )
        if self.has_text_pairs:
            prompt = list(map(plain_id, prompt))
        if len(prompt) > num_known:
            check_vocabulary(prompt[num_known:] if num_known else prompt, self.vocab_size)


def gives_no_text() -> RequestError:
    """Return the error for a generation request to a pooling engine."""
    return RequestError(
        "this engine returns embeddings, scores or classes, and generates no text. Start an engine"
        " with runner='generate' (--runner generate) if the model can generate.",
        code=WRONG_RUNNER,
    )


def check_vocabulary(token_ids: list[int], vocab_size: int) -> None:
    """Raise RequestError if one of these prompt tokens does not exist; token_ids must not be
    empty."""
    try:
        packed = np.frombuffer(array("I", token_ids), np.uintc)  # a third of the time of `min`
        low, high = int(packed.min()), int(packed.max())
    except (OverflowError, TypeError):  # a number below 0, or a very large one
        low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"prompt token id {wrong} is not in the vocabulary of {vocab_size}; give ids below it.",
            PROMPT,
        )


def _check_named_in_prompt(request: Request) -> None:
    """Check that prompt_logprob_token_ids, if set, has one list for each prompt token after the
    first."""
    rows, num = request.params.named_in_prompt, len(request.prompt_token_ids) - 1
    if rows and len(rows) != num:
        start = request.params.prompt_logprob_start or 0
        raise RequestError(
            f"prompt_logprob_token_ids has {len(rows) - start} lists, but the prompt has"
            f" {max(0, num - start)} tokens after prompt_logprob_start={start}; give one list for"
            " each.",
            "prompt_logprob_token_ids",
        )

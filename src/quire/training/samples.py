"""Sampled responses in the form that a trainer needs.

Shape legend: R response tokens of all samples together.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from quire.base.errors import RequestError
from quire.base.plan import UNKNOWN, Int16
from quire.base.requests.outputs import RequestOutput


@dataclass(frozen=True, eq=False)
class Samples:
    """Prompts and responses as token ids, with the engine's log-probabilities.

    prompts, responses: one of each per sample; samples of one request repeat its prompt. logprobs:
    float32 [R], of the response tokens of all samples in order. They come from the raw logits:
    before temperature, penalties, masks, top-k, top-p and min-p. routes: experts of each sample's
    tokens but the last, of an engine with enable_return_routed_experts; else None.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: torch.Tensor
    routes: list[Int16] | None = None

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> "Samples":
        """Collect all continuations of finished requests. Raises RequestError if one of them lacks
        its log-probabilities, or its experts while others have theirs."""
        prompts, responses, logprobs = list[list[int]](), list[list[int]](), list[float]()
        routes = list[Int16 | None]()
        for output in outputs:
            for sample in output.outputs:
                if sample.logprobs is None or output.prompt_token_ids is None:
                    raise RequestError(
                        f"request {output.request_id} has no log-probabilities; set logprobs=0 in"
                        " its SamplingParams.",
                        "logprobs",
                    )
                prompts.append(list(output.prompt_token_ids))
                responses.append(list(sample.token_ids))
                pairs = zip(sample.token_ids, sample.logprobs, strict=True)
                logprobs += [found[token].logprob for token, found in pairs]
                routes.append(sample.routed_experts)
        logprobs_R = torch.tensor(logprobs, dtype=torch.float32)
        return cls(prompts, responses, logprobs_R, _all_routes(prompts, responses, routes))

    @property
    def lengths(self) -> list[int]:
        """Return the number of response tokens of each sample; they add up to R."""
        return [len(response) for response in self.responses]


def _all_routes(
    prompts: list[list[int]], responses: list[list[int]], routes: list[Int16 | None]
) -> list[Int16] | None:
    """Return the experts of all samples; None if no sample has any.

    A sample without a response, which ended before its first step, gets unknown experts. Raises
    RequestError for a sample with a response but no experts."""
    shape = next((each.shape[1:] for each in routes if each is not None), None)
    if shape is None:
        return None
    found = list[Int16]()
    for number, (prompt, own) in enumerate(zip(prompts, routes, strict=True)):
        if own is None and responses[number]:
            raise RequestError(
                f"sample {number} has no experts, but others have; take all samples from engines"
                " with enable_return_routed_experts.",
                "routed_experts",
            )
        if own is None:  # the trainer computes the last token of a prompt with no other token
            own = np.full((max(1, len(prompt) - 1), *shape), UNKNOWN, np.int16)
        found.append(own)
    return found

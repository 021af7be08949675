"""Sampled responses in the form that a trainer needs.

Shape legend: R response tokens of all samples together.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.base.errors import RequestError
from quire.base.plan import Int16
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
        its log-probabilities."""
        prompts, responses, logprobs = list[list[int]](), list[list[int]](), list[float]()
        routes = list[Int16]()
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
                if sample.routed_experts is not None:
                    routes.append(sample.routed_experts)
        has_routes = bool(routes) and len(routes) == len(prompts)
        logprobs_R = torch.tensor(logprobs, dtype=torch.float32)
        return cls(prompts, responses, logprobs_R, routes if has_routes else None)

    @property
    def lengths(self) -> list[int]:
        """Return the number of response tokens of each sample; they add up to R."""
        return [len(response) for response in self.responses]

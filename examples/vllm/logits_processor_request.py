"""Change the logits of single requests by functions.

vLLM: examples/features/logits_processor/custom_req.py
"""

import torch
from vllm import LLM, SamplingParams
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class DummyPerReqLogitsProcessor:
    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = kept
        return logits


class WrappedPerReqLogitsProcessor(AdapterLogitsProcessor):
    """Makes a function for each request that names a token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target = params.extra_args and params.extra_args.get("target_token")
        if target is None:
            return None
        if not isinstance(target, int):
            logger.warning("target_token value %s is not int", target)
            return None
        return DummyPerReqLogitsProcessor(target)


def main():
    llm = LLM(model="demo", logits_processors=[WrappedPerReqLogitsProcessor])
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, extra_args={"target_token": 128}),
        SamplingParams(temperature=0.0, max_tokens=4),
    ]
    outputs = llm.generate(["Hello, my name is", "Once upon a time"], params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r} Output: {output.outputs[0].token_ids}")
    assert outputs[0].outputs[0].token_ids == [128] * 4
    assert outputs[1].outputs[0].token_ids != [128] * 4


if __name__ == "__main__":
    main()

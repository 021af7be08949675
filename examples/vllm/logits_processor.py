"""Change the logits of a batch by a class.

vLLM: examples/features/logits_processor/custom.py
"""

from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class DummyLogitsProcessor(LogitsProcessor):
    """Allows only the token that a request names."""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        target: Any = params.extra_args and params.extra_args.get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token value {target} is not int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.req_info: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(
            self.req_info,
            batch_update,
            lambda params, _, __: params.extra_args and params.extra_args.get("target_token"),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.req_info.items():
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits


def main():
    llm = LLM(model="demo", logits_processors=[DummyLogitsProcessor])
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

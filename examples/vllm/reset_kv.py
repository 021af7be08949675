"""Forget the prefix cache while requests run.

vLLM: examples/features/reset_kv/reset_kv_offline.py
"""

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = [
    ("A robot may not injure " * 20, SamplingParams(temperature=0.0, max_tokens=16)),
    ("What is it?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=32)),
]


def main():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args()))
    prompts, step_id = list(PROMPTS), 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, sampling_params = prompts.pop(0)
            engine.add_request(str(step_id), prompt, sampling_params)
        if step_id == 10:
            engine.reset_prefix_cache(reset_running_requests=True)
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                print(output.request_id, [each.text for each in output.outputs])
        step_id += 1


if __name__ == "__main__":
    main()

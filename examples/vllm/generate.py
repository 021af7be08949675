"""Continue prompts with settings from the command line.

vLLM: examples/offline_inference/basic/generate.py
"""

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser

PROMPTS = ["Hello, my name is", "Once upon a time", "The capital of France is"]


def main():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="demo", max_model_len=512)
    llm = LLM(**vars(parser.parse_args()))
    params = llm.get_default_sampling_params()
    params.max_tokens = 8
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r} Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()

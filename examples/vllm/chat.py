"""Answer one conversation and a batch of them, with the engine's settings as flags.

vLLM: examples/basic/offline_inference/chat.py
"""

from vllm import LLM, EngineArgs
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    return vars(parser.parse_args(["--max_model_len", "1K", "--max-tokens", "8"]))


def show(outputs: list[RequestOutput]):
    for output in outputs:
        print(f"Generated text: {output.outputs[0].text!r}")


def main():
    args = parse_args()
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if temperature is not None:
        params.temperature = temperature
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Tell me a story about a fox."},
    ]
    show(llm.chat(conversation, params, use_tqdm=False))
    show(llm.chat([conversation] * 3, params, use_tqdm=True))


if __name__ == "__main__":
    main()

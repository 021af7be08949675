"""Score texts with a model of rewards.

vLLM: examples/basic/offline_inference/reward.py
Needs: classify
"""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args() -> Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main():
    llm = LLM(**vars(parse_args()))
    for output in llm.encode(["Hello, my name is"], pooling_task="classify"):
        print(f"Reward: {output.outputs.data} (size={len(output.outputs.data)})")


if __name__ == "__main__":
    main()

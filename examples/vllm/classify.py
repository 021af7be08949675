"""Print the probabilities of each prompt's classes.

vLLM: examples/basic/offline_inference/classify.py
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
    for output in llm.classify(["Hello, my name is", "The future of AI is"]):
        probs = output.outputs.probs
        print(f"Class probabilities: {probs} (size={len(probs)})")


if __name__ == "__main__":
    main()

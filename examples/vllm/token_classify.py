"""Get the class of each token.

vLLM: examples/pooling/token_classify/ner.py
Needs: classify
Refused: pooling_task must be embed or classify, got 'token_classify'
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
    for output in llm.encode(["Hello, my name is"], pooling_task="token_classify"):
        print(output.outputs.data.shape)


if __name__ == "__main__":
    main()

"""Print the embedding of each prompt.

vLLM: examples/basic/offline_inference/embed.py
Needs: embed
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
    for output in llm.embed(["Hello, my name is", "The future of AI is"]):
        embedding = output.outputs.embedding
        print(f"Embedding: {embedding[:4]} (size={len(embedding)})")


if __name__ == "__main__":
    main()

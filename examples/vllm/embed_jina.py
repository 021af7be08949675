"""Embed texts with a model whose repository has code.

vLLM: examples/pooling/embed/embed_jina_embeddings_v3_offline.py
Needs: embed
"""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args() -> Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(runner="pooling", trust_remote_code=True)
    return parser.parse_args()


def main():
    llm = LLM(**vars(parse_args()))
    outputs = llm.embed(["Follow the white rabbit.", "Folge dem weißen Kaninchen."])
    for output in outputs:
        print(f"Embedding size: {len(output.outputs.embedding)}")


if __name__ == "__main__":
    main()

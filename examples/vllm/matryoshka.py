"""Keep the first dimensions of each embedding.

vLLM: examples/pooling/embed/embed_matryoshka_fy_offline.py
Needs: embed
"""

from argparse import Namespace

from vllm import LLM, EngineArgs, PoolingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args() -> Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main():
    llm = LLM(**vars(parse_args()))
    outputs = llm.embed(["Follow the white rabbit."], pooling_params=PoolingParams(dimensions=32))
    for output in outputs:
        print(f"Embedding size: {output.outputs.embedding[:2]} {len(output.outputs.embedding)}")


if __name__ == "__main__":
    main()

"""Score one text against several.

vLLM: examples/basic/offline_inference/score.py
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
    documents = ["Paris is the capital of France.", "Foxes live in forests."]
    for document, output in zip(documents, llm.score("Where is Paris?", documents), strict=True):
        print(f"Document: {document!r} Score: {output.outputs.score}")


if __name__ == "__main__":
    main()

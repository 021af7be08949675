"""Load weights that are divided by rank.

vLLM: examples/features/sharded_state/load_sharded_state_offline.py
Refused: load_format must be one of
"""

from dataclasses import asdict

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(load_format="sharded_state")
    llm = LLM(**asdict(EngineArgs.from_cli_args(parser.parse_args())))
    llm.generate("Hello", SamplingParams(temperature=0.8))


if __name__ == "__main__":
    main()

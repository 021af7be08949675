"""Save each rank's weights.

vLLM: examples/features/sharded_state/save_sharded_state_offline.py
Refused: quire has no LLMEngine.engine_core: quire's own core is `llm.engine`
"""

import dataclasses

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine_args = EngineArgs.from_cli_args(parser.parse_args())
    llm = LLM(**dataclasses.asdict(engine_args))
    llm.llm_engine.engine_core.save_sharded_state(path="out", pattern=None, max_size=5 * 1024**3)


if __name__ == "__main__":
    main()

"""Use an adapter with a quantised model.

vLLM: examples/features/lora/lora_with_quantization_offline.py
Needs: adapter
"""

import argparse
import gc

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapter", required=True)
    adapter = LoRARequest("lora-test-1", 1, parser.parse_args().adapter)
    args = EngineArgs(model="demo", quantization="int8", enable_lora=True, max_lora_rank=64)
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("0", "Hello", SamplingParams(max_tokens=8), lora_request=adapter)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(output.outputs[0].text)
    del engine
    gc.collect()


if __name__ == "__main__":
    main()

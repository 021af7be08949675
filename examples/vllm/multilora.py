"""Run requests with and without adapters in one engine.

vLLM: examples/features/lora/multilora_offline.py
Needs: adapter
"""

import argparse

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapter", required=True)
    adapter = LoRARequest("sql-lora", 1, parser.parse_args().adapter)
    args = EngineArgs(model="demo", enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2)
    engine = LLMEngine.from_engine_args(args)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    engine.add_request("0", "To be or not to be,", params)
    engine.add_request("1", "Write a query.", params, lora_request=adapter)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(output.request_id, output.outputs[0].text)


if __name__ == "__main__":
    main()

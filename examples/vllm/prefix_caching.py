"""Compare answers with and without the prefix cache.

vLLM: examples/features/automatic_prefix_caching/prefix_caching_offline.py
"""

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PREFIX = "You are an expert school principal, who is kind to teachers and children. " * 3
PROMPTS = [PREFIX + text for text in ("Hello, my name is", "The capital of France is")]


def main():
    params = SamplingParams(temperature=0.0)
    regular_llm = LLM(model="demo", gpu_memory_utilization=0.4)
    regular = [output.outputs[0].text for output in regular_llm.generate(PROMPTS, params)]
    del regular_llm
    cleanup_dist_env_and_memory()
    cached_llm = LLM(model="demo", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached_llm.generate(PROMPTS[0], params)
    cached = [output.outputs[0].text for output in cached_llm.generate(PROMPTS, params)]
    print(f"Generated answers are the same: {regular == cached}")
    assert regular == cached


if __name__ == "__main__":
    main()

"""Run replicas of a model in several processes.

vLLM: examples/features/data_parallel/data_parallel_offline.py
Change: one `LLM(data_parallel_size=2)` instead of a process with `VLLM_DP_RANK` for each
"""

from vllm import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "Once upon a time", "The capital of France is"]


def main():
    llm = LLM(model="demo", data_parallel_size=2, kv_cache_memory_bytes=100_000_000)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r} Generated text: {output.outputs[0].text!r}")
    llm.close()


if __name__ == "__main__":
    main()

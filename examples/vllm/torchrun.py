"""Run one rank of a model in each process of torchrun.

vLLM: examples/features/torchrun/torchrun_example_offline.py
Refused: distributed_executor_backend must be one of
"""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model="demo", distributed_executor_backend="external_launcher", seed=1)
    print(llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8)))


if __name__ == "__main__":
    main()

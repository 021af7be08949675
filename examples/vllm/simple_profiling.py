"""Profile a few requests.

vLLM: examples/features/profiling/simple_profiling_offline.py
Refused: use --record and quire trace (docs/operate/recording.md)
"""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(
        model="demo",
        profiler_config={"profiler": "torch", "torch_profiler_dir": "./vllm_profile"},
    )
    llm.start_profile()
    llm.generate("Hello, my name is", SamplingParams(temperature=0.8))
    llm.stop_profile()


if __name__ == "__main__":
    main()

"""Print the metrics of an engine in this process.

vLLM: examples/offline_inference/metrics.py
"""

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

PROMPTS = ["Hello, my name is", "Once upon a time", "The capital of France is"]


def main():
    llm = LLM(model="demo", disable_log_stats=False)
    llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram) sum = {metric.sum} count = {metric.count}")
            for bucket_le, value in metric.buckets.items():
                print(f"    {bucket_le} = {value}")


if __name__ == "__main__":
    main()

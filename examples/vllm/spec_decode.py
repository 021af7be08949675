"""Draft tokens from the prompt, and count the accepted ones.

vLLM: examples/features/speculative_decoding/spec_decode_offline.py
"""

from vllm import LLM, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter, Vector


def parse_args():
    parser = FlexibleArgumentParser()
    parser.add_argument("--method", type=str, default="ngram")
    parser.add_argument("--num-spec-tokens", type=int, default=3)
    return parser.parse_args()


def main():
    args = parse_args()
    llm = LLM(
        model="demo",
        trust_remote_code=True,
        speculative_config={
            "method": args.method,
            "num_speculative_tokens": args.num_spec_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        },
        disable_log_stats=False,
        max_model_len=1024,
        disable_chunked_mm_input=True,
    )
    ids = llm.get_tokenizer().encode("The fox ran. The fox ran. The fox ran. The fox")
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    llm.generate([{"prompt_token_ids": ids, "multi_modal_data": None}], sampling_params=params)
    counts = {
        metric.name: metric.value if isinstance(metric, Counter) else metric.values
        for metric in llm.get_metrics()
        if isinstance(metric, Counter | Vector) and "spec_decode" in metric.name
    }
    print(counts)
    assert counts["vllm:spec_decode_num_drafts"] > 0


if __name__ == "__main__":
    main()

"""Get the log-probabilities of a known answer.

vLLM: examples/generate/trace_replay_offline.py
Change: `prompt_logprobs` of prompt and answer instead of `trace_decode_token_ids`
"""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model="demo", max_num_seqs=16)
    [normal] = llm.generate("Hello, my name is", SamplingParams(temperature=0.0, max_tokens=8))
    answer = normal.outputs[0].token_ids
    prompt = {"prompt_token_ids": normal.prompt_token_ids + answer}
    [scored] = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
    for token, found in zip(answer, scored.prompt_logprobs[-len(answer) :], strict=True):
        print(f"token_id={token} logprob={found[token].logprob:.4f} rank={found[token].rank}")


if __name__ == "__main__":
    main()

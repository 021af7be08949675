"""Search for the most probable texts.

vLLM: docs/models/generative_models.md
"""

from vllm import LLM
from vllm.inputs import TokensPrompt
from vllm.sampling_params import BeamSearchParams


def main():
    llm = LLM(model="demo")
    prompt = TokensPrompt(prompt_token_ids=llm.get_tokenizer().encode("Once upon a"))
    for output in llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=8)):
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:.2f} {sequence.text!r}")


if __name__ == "__main__":
    main()

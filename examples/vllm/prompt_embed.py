"""Give prompts as embeddings.

vLLM: examples/features/prompt_embed/prompt_embed_offline.py
Refused: send prompts as text or token ids
"""

import torch
from vllm import LLM


def main():
    llm = LLM(model="demo", enable_prompt_embeds=True)
    print(llm.generate({"prompt_embeds": torch.zeros(4, 256)}))


if __name__ == "__main__":
    main()

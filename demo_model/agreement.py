"""Check the shipped files against transformers: python -m demo_model.agreement [folder].

The logits, the greedy answer and the rendered chats must agree with LlamaForCausalLM,
AutoTokenizer and the jinja chat template.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import chat, curriculum, generation
from .tokenizer import DEFAULT_FOLDER


def check_template(folder: Path, chats: int = 300) -> None:
    """Compare the chat template with `chat.render` on many conversations."""
    reference = AutoTokenizer.from_pretrained(folder)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(3)
    for _ in range(chats):
        item = curriculum.one(rng.choice(list(curriculum.KINDS)), rng, test=True)
        messages = curriculum.system_message(rng) + item.messages
        text = reference.apply_chat_template(messages, tools=item.tools or None, tokenize=False)
        assert text == chat.render(messages, item.tools), text
        prompt = reference.apply_chat_template(
            messages[:-1], tools=item.tools or None, tokenize=False, add_generation_prompt=True
        )
        assert prompt == chat.render(messages[:-1], item.tools, prompt=True), prompt
        assert reference(text).input_ids == own.encode(text).ids
        assert own.decode(own.encode(text).ids, skip_special_tokens=False) == text
    print(f"{chats} chats: the same text and tokens")


def check_logits(folder: Path) -> None:
    """Compare logits and a greedy answer with transformers, both in fp32."""
    own = generation.load(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = chat.render([{"role": "user", "content": "Tell me a story about a fox."}], prompt=True)
    ids = tokenizer.encode(prompt).ids
    with torch.no_grad():
        tokens = torch.tensor([ids * 20])
        difference = own.logits(own.hidden(tokens)) - reference(tokens).logits
    print(f"largest difference of logits: {difference.abs().max():.2e}")
    assert difference.abs().max() < 1e-3
    tokens = reference.generate(torch.tensor([ids]), max_new_tokens=200, do_sample=False)
    expected = tokens[0, len(ids) :].tolist()
    found = generation.generate(own, [ids, ids[:-3], ids], 200)[0]
    assert found == [token for token in expected if token not in (0, 2)]
    print("the same greedy answer:", tokenizer.decode(found))


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    check_template(chosen)
    check_logits(chosen)

"""Train and write the byte-level BPE tokenizer: python -m demo_model.tokenizer [folder]."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import chat, curriculum
from .words import ALL_WORDS

VOCABULARY = 1536
SPECIAL = [chat.STOP, chat.START, chat.END]
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
DEFAULT_FOLDER = Path(__file__).parent.parent / "src" / "quire" / "demo"


def corpus(texts: int, seed: int) -> Iterator[str]:
    """Yield conversations, and every word of the vocabulary with and without a space before."""
    rng = random.Random(seed)
    for _ in range(texts):
        yield curriculum.conversation(rng, 100)
    for word in ALL_WORDS:
        for _ in range(200):
            yield word
            yield " " + word


def train(texts: int = 30_000, seed: int = 1) -> Tokenizer:
    """Return a trained tokenizer: each digit its own token, every byte encodable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = [chat.CALL_OPEN, chat.CALL_CLOSE]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(tags),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(texts, seed), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in [*SPECIAL, chat.CALL_OPEN, chat.CALL_CLOSE]
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": chat.END,
        "pad_token": chat.STOP,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(train(), Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER)

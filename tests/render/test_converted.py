"""Vocabularies without tokenizer.json give the ids of their own packages.

These are SentencePiece, and tiktoken for its own files and for tekken.json."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken

from quire import LLM, SamplingParams
from quire.base.errors import MissingDependency, ModelError
from quire.render.tokens import converted
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import has_tokenizer
from tests.support.models.reference_checkpoints import write_checkpoint

TEXT = Path(__file__).read_text("utf-8") * 2
TEXTS = ["", "Hello world", " two  spaces ", "你好 🙂\n\ttab", "it's 12345", "x\n\n\n  y", "naïve"]
# The patterns by which Llama 3 and tekken split a text into words.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 10  # ids of tekken's special tokens, which come first


def ranks(num: int) -> dict[bytes, int]:
    """Return ranks of every byte, followed by random joins of two earlier tokens."""
    draws = random.Random(0)
    found = {bytes([byte]): byte for byte in range(256)}
    letters = [b"%c" % byte for byte in b" abcdefghilnorstuwH"]
    while len(found) < num:
        joined = draws.choice(letters) + draws.choice(letters)
        if joined not in found:
            letters.append(joined)
            found[joined] = len(found)
    return found


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_sentence_piece(folder: Path, kind: str, **settings: Any) -> Any:
    """Write a vocabulary and return its SentencePiece processor."""
    plain = {"byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type=kind,
        minloglevel=2,
        **(plain | {"remove_extra_whitespaces": False} if kind == "bpe" else {}),
    )
    write_settings(folder, **settings)
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def write_tiktoken(folder: Path, name: str = "tokenizer.model", **settings: Any) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks(400).items())
    (folder / name).write_text("\n".join(lines) + "\n")
    write_settings(folder, **settings)


def write_tekken(folder: Path) -> None:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks(400).items()
    ]
    special = [
        {"rank": i, "token_str": text, "is_control": True}
        for i, text in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    ]
    config = {"pattern": TEKKEN, "num_vocab_tokens": 400, "version": "v3"}
    config |= {"default_vocab_size": 410, "default_num_special_tokens": NUM_SPECIAL}
    whole = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False, "add_eos_token": True}], ids=str)
def test_ids_equal_those_of_sentencepiece(
    kind: str, settings: dict[str, bool], tmp_path: Path
) -> None:
    theirs = write_sentence_piece(tmp_path, kind, **settings)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())
    before = [theirs.bos_id()] if settings.get("add_bos_token", True) else []
    after = [theirs.eos_id()] if settings.get("add_eos_token") else []
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == before + ids + after
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


def test_ids_equal_those_of_tiktoken(tmp_path: Path) -> None:
    declared = {str(400 + i): {"content": f"<|s{i}|>", "special": True} for i in range(3)}
    settings = {"eos_token": "<|s1|>", "added_tokens_decoder": declared}
    theirs = tiktoken.Encoding("", pat_str=LLAMA3, mergeable_ranks=ranks(400), special_tokens={})
    for name in ("tokenizer.model", "tiktoken.model"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        write_tiktoken(folder, name, **settings)
        ours = Tokenizer.from_directory(folder)
        assert ours.vocab_size == 403 and ours.eos_token_id == 401
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == text
        assert ours.encode("a<|s2|>")[-1] == 402


def test_ids_of_tekken_equal_those_of_tiktoken(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    theirs = tiktoken.Encoding("", pat_str=TEKKEN, mergeable_ranks=ranks(400), special_tokens={})
    for text in TEXTS:
        ids = [NUM_SPECIAL + token for token in theirs.encode(text)]
        assert ours.encode(text) == [1, *ids]
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == text
    assert ours.encode("[INST]", add_special_tokens=False) == [3]


@pytest.mark.slow
def test_engine_serves_text_with_a_tekken_tokenizer(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    write_checkpoint(tmp_path, "llama", 410)
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(str(tmp_path), dtype="float32", disable_log_stats=True) as llm:
        [output] = llm.generate("Hello", params, use_tqdm=False)
    assert output.prompt_token_ids[0] == 1 and isinstance(output.outputs[0].text, str)


@pytest.mark.parametrize(
    ("package", "write"),
    [
        ("sentencepiece", lambda folder: write_sentence_piece(folder, "bpe")),
        ("tiktoken", write_tiktoken),
        ("transformers", write_tekken),
    ],
)
def test_error_names_the_missing_package(
    package: str, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    assert has_tokenizer(tmp_path)
    monkeypatch.setattr(converted, "_is_installed", lambda name: name != package)
    with pytest.raises(
        MissingDependency, match=rf'needs {package}: pip install "quire\[tokenizers'
    ):
        Tokenizer.from_directory(tmp_path)


def test_vocabularies_that_cannot_be_converted_are_rejected(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, auto_map={"AutoTokenizer": ["tokenization.Own", None]})
    with pytest.raises(ModelError, match="auto_map in tokenizer_config.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\nnot a vocabulary")
    with pytest.raises(ModelError, match="cannot be read as a vocabulary of SentencePiece"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read as a vocabulary of Mistral's tekken"):
        Tokenizer.from_directory(tmp_path)

"""`Tokenizer` gives what transformers' fast tokenizer gives, from the same directory.

Covers `render/tokens/tokenizer_backend.py`.
"""

import json
import random
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from quire.base.errors import ModelError, RequestError
from quire.render.tokens.bad_words import bad_words_token_ids
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import has_tokenizer
from tests.support.render.tiny_tokenizers import (
    FAMILIES,
    byte_level,
    directory,
    tokenizer,
    write_directory,
)

TEXTS = ["", "Hello world", " two  spaces ", "你好 🙂\n\ttab", "<s>x</s><|im_end|> a <tool_call>b"]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_texts_equal_those_of_transformers(family: str) -> None:
    ours, theirs = tokenizer(family), AutoTokenizer.from_pretrained(directory(family))
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special_tokens=skip) == expected
        assert ours.tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert set(theirs.get_added_vocab().values()) == ours.added_tokens.keys()


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_config_decides_on_bos_and_eos(tmp_path: Path, bos: bool, eos: bool) -> None:
    """A tokenizer.json overrides these flags of the config, as in transformers 5."""
    flags = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    flags |= {"add_bos_token": bos, "add_eos_token": eos}
    for family in ("byte_level", "llama"):
        folder = tmp_path / family
        named = flags if family == "byte_level" else {"add_bos_token": bos, "add_eos_token": eos}
        write_directory(folder, family, **named)
        ours, theirs = Tokenizer.from_directory(folder), AutoTokenizer.from_pretrained(folder)
        assert ours.encode("Hello") == theirs.encode("Hello")
    folder = tmp_path / "gpt2"
    folder.mkdir()
    byte_level().model.save(str(folder))
    tok = Tokenizer.from_directory(_with_config(folder, flags))
    ids = tok.encode("Hello")
    assert (ids[0] == tok.bos_token_id, ids[-1] == tok.eos_token_id) == (bos, eos)
    assert tok.encode("Hello", add_special_tokens=False) == ids[bos : len(ids) - eos]
    assert ids == AutoTokenizer.from_pretrained(folder).encode("Hello")


def _with_config(folder: Path, values: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def test_tokens_that_only_the_config_declares_are_added(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    declared = {
        str(size): {"content": "<think>", "special": False},
        str(size + 1): {"content": "<|x|>", "special": True},
    }
    write_directory(
        tmp_path, "byte_level", added_tokens_decoder=declared, additional_special_tokens=["<|x|>"]
    )
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "<think>a<|x|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == "<think>a"


def test_gpt2_directory_is_read_as_by_transformers(tmp_path: Path) -> None:
    """The directory holds vocab.json and merges.txt, but no tokenizer.json."""
    backend = byte_level()
    backend.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:4]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_id == theirs.eos_token_id is not None
    assert ours.eos_token_id in ours.special_ids
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(ModelError, match="RobertaTokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_missing_or_unreadable_tokenizer_files_are_reported(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="prompt_token_ids"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelError, match="convert it"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="JSON object"):
        Tokenizer.from_directory(tmp_path)


def test_chat_templates_are_read_from_the_config_and_from_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_directory(tmp_path, "byte_level", chat_template=named)
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    tok = Tokenizer.from_directory(tmp_path)
    assert tok.chat_templates == {"default": "c", "tool_use": "b", "rag": "d"}
    assert tok.chat_template == "c"


def test_chat_template_is_read_from_a_json_file(tmp_path: Path) -> None:
    write_directory(tmp_path, "byte_level")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "x"}')
    assert Tokenizer.from_directory(tmp_path).chat_template == "x"


def test_text_that_is_not_unicode_is_rejected() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer("byte_level").encode("\ud800")


def test_bad_words_are_forbidden_with_and_without_a_space() -> None:
    tok = tokenizer("byte_level")
    plain, spaced = tok.encode("dog"), tok.encode(" dog")
    assert len(plain) != len(spaced) and spaced[-len(plain) :] != plain
    assert set(bad_words_token_ids(["dog", " dog"], tok)) == {tuple(plain), tuple(spaced)}
    the = bad_words_token_ids([" the"], tok)
    assert tuple(tok.encode("the")) in the


def test_space_that_is_its_own_token_stays_allowed_before_a_bad_word() -> None:
    """Forbidding the word after the space is enough."""
    tok = tokenizer("byte_level")
    word = "\u4e00"
    space, plain = tok.encode(" "), tok.encode(word)
    assert tok.encode(f" {word}") == space + plain
    assert bad_words_token_ids([word], tok) == (tuple(plain),)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_processed(work: str) -> None:
    """A call that held the GIL would allow them one or two turns."""
    tok, numbers = tokenizer("byte_level"), random.Random(1)
    words = ["The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog."]
    text, other = (" ".join(numbers.choices(words, k=90_000)) for _ in range(2))
    calls = {
        "encode": lambda: tok.encode(other),
        "decode": lambda: tok.decode(token_ids),
    }
    token_ids = tok.encode(text) * 4
    is_inside, is_over, turns = threading.Event(), threading.Event(), 0

    def take_turns() -> None:
        nonlocal turns
        is_inside.wait()
        while not is_over.is_set():
            turns += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=take_turns)
    thread.start()
    is_inside.set()
    calls[work]()
    is_over.set()
    thread.join()
    assert turns > 20

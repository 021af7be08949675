"""Tokens"""

import pytest

from tests.support.serve.vllm_cases import ASK, TOOLS, Asked

TEXT = "This is a test."


@pytest.mark.parametrize("special", [False, True])
def test_text(asked: Asked, special: bool) -> None:
    """/tokenize gives a text's ids and their number, with special tokens or without"""
    found = asked.post("/tokenize", model="demo", prompt=TEXT, add_special_tokens=special)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 2048
    assert found["token_strs"] is None
    shown = asked.post("/detokenize", tokens=found["tokens"])["prompt"]
    assert shown.endswith(TEXT)


def test_strings(asked: Asked) -> None:
    """return_token_strs gives them, too"""
    found = asked.post("/tokenize", prompt=TEXT, return_token_strs=True)
    assert len(found["token_strs"]) == found["count"]


@pytest.mark.parametrize("begins", [False, True])
def test_chat(asked: Asked, begins: bool) -> None:
    """a conversation has the tokens of a chat with it, with the beginning of an answer or not"""
    found = asked.post("/tokenize", messages=ASK, add_generation_prompt=begins)
    chat = asked.chat(return_token_ids=True, add_generation_prompt=begins)
    assert found["tokens"] == chat.prompt_token_ids


def test_chat_gone_on_with(asked: Asked) -> None:
    """one to be gone on with has fewer"""
    talk = [*ASK, {"role": "assistant", "content": "Sure,"}]
    given = {"messages": talk, "add_generation_prompt": False}
    ends = asked.post("/tokenize", **given)["count"]
    goes_on = asked.post("/tokenize", continue_final_message=True, **given)["count"]
    assert goes_on < ends


def test_both_ends(asked: Asked) -> None:
    """and cannot begin another answer"""
    given = {"continue_final_message": True, "add_generation_prompt": True}
    assert (
        "continue_final_message" in asked.post("/tokenize", 400, messages=ASK, **given)["message"]
    )


def test_chat_with_tools(asked: Asked) -> None:
    """tools are among them"""
    plain = asked.post("/tokenize", messages=ASK)["count"]
    assert asked.post("/tokenize", messages=ASK, tools=TOOLS)["count"] > plain


def test_neither(asked: Asked) -> None:
    """neither text nor conversation is refused"""
    assert asked.post("/tokenize", 400)["param"] == "prompt"


def test_back(asked: Asked) -> None:
    """/detokenize gives the text of ids"""
    ids = asked.tokens(TEXT, add_special_tokens=False)
    assert asked.post("/detokenize", model="demo", tokens=ids)["prompt"] == TEXT


@pytest.mark.parametrize("token", [-1, 10**7, 2**40])
def test_unknown(asked: Asked, token: int) -> None:
    """ids outside the vocabulary are refused"""
    assert asked.post("/detokenize", 400, tokens=[token])["param"].startswith("tokens")


def test_other_model(asked: Asked) -> None:
    """another model's name is a 404"""
    assert asked.post("/tokenize", 404, model="other", prompt=TEXT)["message"]


def test_info(asked: Asked) -> None:
    """/tokenizer_info tells the named tokens and the chat template"""
    found = asked.get("/tokenizer_info").json()
    assert "messages" in found["chat_template"] and found["model_max_length"] == 2048
    assert len(asked.tokens(found["eos_token"], add_special_tokens=False)) == 1

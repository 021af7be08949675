"""Chats"""

from typing import Any

import pytest

from tests.support.serve.vllm_cases import ASK, Asked, differs, refused, text_of


def test_one(asked: Asked) -> None:
    """an answer has a role, a text, an end and a usage that adds up"""
    found = asked.chat()
    [choice] = found.choices
    assert found.id.startswith("chatcmpl-") and found.object == "chat.completion"
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and found.usage.completion_tokens == 5


def test_turns(asked: Asked) -> None:
    """an answer goes back as a message, and the talk goes on"""
    first = asked.chat().choices[0].message
    more = [*ASK, first.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
    assert asked.chat(more).choices[0].message.content


def test_stream(asked: Asked) -> None:
    """a stream joins to the answer in one piece; its last chunk alone says why it ended"""
    chunks = list(asked.chat(stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == asked.chat().choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}


def test_system(asked: Asked) -> None:
    """a system's message is part of the prompt"""
    told = [{"role": "system", "content": "You know foxes."}, *ASK]
    assert asked.chat(told).usage.prompt_tokens > asked.chat().usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_n(asked: Asked, stream: bool) -> None:
    """n choices, streamed or not, each with its own text"""
    texts = ["", "", ""]
    more: dict[str, Any] = {"n": 3, "temperature": 1, "seed": 5, "max_completion_tokens": 20}
    if stream:
        for chunk in asked.chat(stream=True, **more):
            for each in chunk.choices:
                texts[each.index] += each.delta.content or ""
    else:
        for choice in asked.chat(**more).choices:
            texts[choice.index] = choice.message.content
    assert all(texts) and len(set(texts)) == 3


def test_one_of_n(asked: Asked) -> None:
    """n=1 is one"""
    assert [each.index for each in asked.chat(n=1).choices] == [0]


def test_parts(asked: Asked) -> None:
    """content in parts is their text"""
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    assert asked.chat(parts).choices[0].message == asked.chat().choices[0].message


def test_custom_role(asked: Asked) -> None:
    """a role of one's own reaches the template, as a text or in parts"""
    text, parts = "what is 1+1?", [{"type": "text", "text": "what is 1+1?"}]
    one, two = ([{"role": "my-role", "content": each}] for each in (text, parts))
    assert asked.chat(one).choices[0].message == asked.chat(two).choices[0].message


def test_extra_fields(asked: Asked) -> None:
    """fields of a message that nobody knows are taken"""
    assert asked.chat([ASK[0] | {"extra_field": "0"}]).choices[0].message.content


def test_name(asked: Asked) -> None:
    """so is a name"""
    assert asked.chat([ASK[0] | {"name": "Ann"}]).choices[0].message.content


def test_echo(asked: Asked) -> None:
    """echo puts the last message before the answer that goes on with it"""
    open_ended = [*ASK, {"role": "assistant", "content": "The red fox"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    plain = asked.chat(open_ended, **more).choices[0].message.content
    assert asked.chat(open_ended, echo=True, **more).choices[0].message.content == (
        "The red fox" + plain
    )


def test_echo_streamed(asked: Asked) -> None:
    """also in a stream"""
    open_ended = [*ASK, {"role": "assistant", "content": "The red fox"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    assert text_of(asked.chat(open_ended, stream=True, **more)).startswith("The red fox")


def test_both_ends(asked: Asked) -> None:
    """a message cannot be gone on with and a new one begun"""
    error = refused(asked.chat, continue_final_message=True, add_generation_prompt=True)
    assert "continue_final_message" in error["message"]


def test_template(asked: Asked) -> None:
    """a template in a request is refused unless the server trusts it"""
    assert refused(asked.chat, chat_template="{{ 1 }}")["param"] == "chat_template"


def test_template_kwargs(asked: Asked) -> None:
    """chat_template_kwargs reach the template"""
    assert asked.chat(chat_template_kwargs={"anything": 1}).choices[0].message.content


def test_max_tokens(asked: Asked) -> None:
    """max_tokens is the older name of max_completion_tokens"""
    assert asked.chat(max_tokens=3, max_completion_tokens=None).usage.completion_tokens == 3


@pytest.mark.parametrize("num", [-1, 100_000])
def test_wrong_max_tokens(asked: Asked, num: int) -> None:
    """fewer than none and more than the context has left are refused"""
    assert refused(asked.chat, max_completion_tokens=num)["param"] == "max_completion_tokens"


def test_no_messages(asked: Asked) -> None:
    """a chat without messages is refused"""
    assert refused(asked.chat, [])["param"] == "messages"


@pytest.mark.parametrize("body", [[], "text", 5, None])
def test_no_object(asked: Asked, body: Any) -> None:
    """a body that is no object is refused"""
    answer = asked.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("message", [{}, {"role": "user"}, {"content": "Hi"}, {"role": 1}, 7])
def test_wrong_message(asked: Asked, message: Any) -> None:
    """a message without role or content is refused by its place"""
    assert refused(asked.chat, [ASK[0], message])["param"].startswith("messages")


def test_image(asked: Asked) -> None:
    """an image is refused by a model that reads text"""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert refused(asked.chat, [{"role": "user", "content": [image]}])["param"].startswith("mess")


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_long_seed(asked: Asked, seed: int) -> None:
    """a seed of more than 64 bits is refused"""
    assert refused(asked.chat, seed=seed)["param"] == "seed"


def test_logit_bias(asked: Asked) -> None:
    """a bias of a token that does not exist is refused, of the last one not"""
    last = 1023
    while asked.http.post("/detokenize", json={"tokens": [last + 1]}).status_code == 200:
        last += 1
    assert asked.chat(logit_bias={str(last): -1}).choices[0].message.content
    for wrong in (last + 1, -1):
        assert refused(asked.chat, logit_bias={str(wrong): 1})["param"].startswith("logit_bias")


def test_stop_token_out_of_vocabulary(asked: Asked) -> None:
    """so are stop_token_ids"""
    assert refused(asked.chat, stop_token_ids=[10_000_000])["param"] == "stop_token_ids"


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation(asked: Asked, side: str) -> None:
    """truncate_prompt_tokens keeps as many, of the side that truncation_side says"""
    whole = asked.chat(return_token_ids=True).prompt_token_ids
    more = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    found = asked.chat(**more).prompt_token_ids
    assert found == (whole[-4:] if side == "left" else whole[:4])


def test_token_ids(asked: Asked) -> None:
    """return_token_ids shows those of prompt and answer"""
    found = asked.chat(return_token_ids=True)
    shown = asked.post("/detokenize", tokens=found.prompt_token_ids)["prompt"]
    assert ASK[0]["content"] in shown and len(found.choices[0].token_ids) == 5


def test_no_token_ids(asked: Asked) -> None:
    """without it there are none"""
    found = asked.chat(return_token_ids=False).model_dump()
    assert found.get("prompt_token_ids") is None
    assert found["choices"][0].get("token_ids") is None


def test_token_ids_streamed(asked: Asked) -> None:
    """a stream tells the prompt's ids once, first, and the answer's as they come"""
    first, *rest = asked.chat(stream=True, return_token_ids=True)
    whole = asked.chat(return_token_ids=True)
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert all(chunk.model_dump().get("prompt_token_ids") is None for chunk in rest)
    ids: list[int] = []
    for chunk in (first, *rest):
        ids += chunk.choices[0].model_dump().get("token_ids") or []
    assert ids == whole.choices[0].token_ids


def test_effort(asked: Asked) -> None:
    """reasoning_effort and include_reasoning are taken where nothing is reasoned"""
    found = asked.chat(reasoning_effort="low", include_reasoning=False)
    assert found.choices[0].message.content


@differs("a digest of everything that determines the bits; vLLM omits it by default")
def test_fingerprint(asked: Asked) -> None:
    """`system_fingerprint` of an answer"""
    assert (asked.chat().system_fingerprint or "").startswith("q2-")


def test_cancelled(asked: Asked) -> None:
    """a client that leaves frees its row: what comes after it is answered"""
    stream = asked.chat(stream=True, ignore_eos=True, max_completion_tokens=1900)
    next(iter(stream))
    stream.close()
    assert asked.chat().choices[0].message.content


def test_priority(asked: Asked) -> None:
    """a priority is taken"""
    assert asked.chat(priority=1).choices[0].message.content


@pytest.mark.parametrize("width", [1, 3])
def test_beams(asked: Asked, width: int) -> None:
    """beams of a chat are its choices"""
    found = asked.chat(use_beam_search=True, n=width).choices
    assert len({choice.message.content for choice in found}) == width

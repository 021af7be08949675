"""The routes of trainers: TRL's server and vLLM's /inference/v1/generate, compared with the engine
and with OpenAI's endpoints.

Covers `serve/rollouts/as_requests.py`, `serve/rollouts/protocol.py`, `serve/rollouts/tokens.py`,
`serve/rollouts/trl.py` and `serve/rollouts/trl_writer.py`.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.rollouts.as_requests import DEFAULTS
from tests.serve.api.conftest import MakeContext
from tests.support.serve.direct_engine import direct

STORY = "Once upon a time"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "max_tokens": 8}
SEEDED = {"temperature": 1.0, "max_tokens": 6, "generation_kwargs": {"seed": 4, "min_tokens": 6}}
TRL_BODIES = {"/generate/": {"prompts": [STORY]}, "/chat/": {"messages": [HELLO]}}
NEW_WEIGHTS = ("/init_communicator/", "/update_named_param/", "/batch_update_named_params/")


@pytest.fixture(scope="module")
def shared(make_context: MakeContext) -> Iterator[TestClient]:
    """One app for the tests that change nothing about it."""
    with TestClient(create_app(make_context()), raise_server_exceptions=False) as client:
        yield client


def answered(api: TestClient, path: str, **body: Any) -> Any:
    response = api.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["message"].endswith(".")
    return found


def completion(api: TestClient, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of /v1/completions, with ids."""
    shown = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choices: list[dict[str, Any]] = answered(
        api, "/v1/completions", prompt=prompt, **fields, **shown
    )["choices"]
    return choices


def tokens_of(api: TestClient, **body: Any) -> Any:
    return answered(api, "/inference/v1/generate", **body)


# ---- TRL's server ------------------------------------------------------------------------------


def test_prompts_are_continued_as_by_completions(shared: TestClient) -> None:
    texts = [STORY, "Hello"]
    own = {"temperature": 1.0, "seed": 4, "min_tokens": 6, "max_tokens": 6}
    expected = completion(shared, texts, logprobs=3, n=2, **own, top_p=1.0, top_k=0)
    found = answered(shared, "/generate/", prompts=texts, n=2, logprobs=3, **SEEDED)
    assert found["prompt_ids"] == [each["prompt_token_ids"] for each in expected[::2]]
    assert found["completion_ids"] == [each["token_ids"] for each in expected]
    for choice, ids, values in zip(
        expected, found["logprob_token_ids"], found["logprobs"], strict=True
    ):
        tops = choice["logprobs"]["top_logprobs"]
        shown = [dict(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
        assert shown == [
            {int(k.removeprefix("token_id:")): v for k, v in top.items()} for top in tops
        ]
        assert all(each == sorted(each, reverse=True) and len(each) in (3, 4) for each in values)
    by_ids = answered(shared, "/generate/", prompts=found["prompt_ids"], n=2, logprobs=3, **SEEDED)
    assert by_ids == found


def test_conversations_are_answered_as_by_chats(shared: TestClient) -> None:
    other = [{"role": "user", "content": "Who are you?"}]
    found = answered(shared, "/chat/", messages=[HELLO, other], logprobs=0, **SEEDED)
    for row, messages in enumerate((HELLO, other)):
        expected = answered(
            shared, "/v1/chat/completions", messages=messages, temperature=1, max_tokens=6, seed=4,
            min_tokens=6, logprobs=True, top_logprobs=0, return_token_ids=True,
        )  # fmt: skip
        [choice] = expected["choices"]
        assert found["prompt_ids"][row] == expected["prompt_token_ids"]
        assert found["completion_ids"][row] == choice["token_ids"]
        values = [[each["logprob"]] for each in choice["logprobs"]["content"]]
        assert found["logprobs"][row] == values
        assert found["logprob_token_ids"][row] == [[each] for each in choice["token_ids"]]
    assert len(answered(shared, "/chat/", messages=[HELLO, other], n=3)["completion_ids"]) == 6


@pytest.mark.parametrize("path", TRL_BODIES)
def test_absent_parameters_have_trls_defaults(shared: TestClient, path: str) -> None:
    ignoring = {"generation_kwargs": {"seed": 1, "ignore_eos": True}}
    found = answered(shared, path, **TRL_BODIES[path], **ignoring)
    same = answered(shared, path, **TRL_BODIES[path], **ignoring, **DEFAULTS)
    assert found == same and len(found["completion_ids"][0]) == DEFAULTS["max_tokens"]
    nothing = answered(shared, path, **TRL_BODIES[path], **ignoring, logprobs=None)
    assert nothing["logprobs"] is None and nothing["logprob_token_ids"] is None
    assert nothing["completion_ids"] == found["completion_ids"]


@pytest.mark.parametrize("path", TRL_BODIES)
def test_a_regex_constrains_the_tokens(shared: TestClient, path: str) -> None:
    body = TRL_BODIES[path] | {"structured_outputs_regex": "[0-9]{3}", "max_tokens": 20}
    [ids] = answered(shared, path, **body)["completion_ids"]
    text = answered(shared, "/detokenize", tokens=ids)["prompt"]
    assert text[:3].isdecimal()


def test_tools_and_variables_reach_the_template(shared: TestClient) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    plain = answered(shared, "/chat/", messages=[HELLO], **GREEDY)["prompt_ids"]
    assert (
        answered(shared, "/chat/", messages=[HELLO], tools=[tool], **GREEDY)["prompt_ids"] != plain
    )


@pytest.mark.parametrize("shape", ["json", "binary"])
def test_sequences_are_scored_as_prompts(shared: TestClient, shape: str) -> None:
    texts = [STORY, "Hello there, who are you"]
    sequences = [answered(shared, "/tokenize", prompt=text)["tokens"] for text in texts]
    lengths, num = [2, 0], 3
    expected = completion(shared, sequences, max_tokens=1, prompt_logprobs=num)
    found = answered(
        shared, "/get_sequence_logprobs/", sequences=sequences, prompt_lengths=lengths,
        top_logprobs=num, response_format=shape,
    )  # fmt: skip
    if shape == "binary":
        assert found["completion_lengths"] == [len(sequences[0]) - 2, len(sequences[1])]
    for row, (choice, length) in enumerate(zip(expected, lengths, strict=True)):
        for place, position in enumerate(choice["prompt_logprobs"][length:]):
            ranked = sorted((position or {}).values(), key=lambda each: each["rank"])
            values = [each["logprob"] for each in ranked]
            if shape == "json":
                assert found["logprobs"][row][place] == values
                assert set(map(str, found["logprob_token_ids"][row][place])) == set(position or {})
                continue
            tops, own = (array(found, name)[row, place] for name in ("logprobs", "actual_logprobs"))
            token = sequences[row][length + place]
            assert array(found, "actual_token_ids", np.int32)[row, place] == token
            if position is None:
                assert np.isinf(tops).all() and np.isinf(own).all()
            else:
                assert tops.tolist() == np.float32(values[:num]).tolist()
                assert own == np.float32(position[str(token)]["logprob"])


def array(found: dict[str, Any], name: str, dtype: Any = np.float32) -> Any:
    values = np.frombuffer(base64.b64decode(found[f"{name}_b64"]), dtype)
    return values.reshape(*found["shape"][:2], -1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate/", {"prompts": []}, "prompts"),
        ("/generate/", {"prompts": [STORY], "images": [["AAAA"]]}, "images"),
        ("/generate/", {"prompts": [STORY] * 300}, "prompts"),
        ("/generate/", {"prompts": [STORY], "generation_kwargs": {"mirostat": 2}}, "mirostat"),
        ("/generate/", {"prompts": [STORY], "logprobs": 21}, "logprobs"),
        ("/chat/", {"messages": [[]]}, "messages"),
        ("/chat/", {"messages": [HELLO], "n": 1000}, "n"),
        ("/chat/", {"messages": [[{"role": "user", "content": [{"type": "image_pil"}]}]]},
         "messages"),
        ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [3]},
         "prompt_lengths"),
        ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": []},
         "prompt_lengths"),
        ("/get_sequence_logprobs/", {"sequences": [[1]], "prompt_lengths": [0], "temperature": 2},
         "temperature"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5], "features": {"mm_hashes": {}}}, "features"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"extra_args": {"a": 1}}},
         "extra_args"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused(
    shared: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert (error_of(shared.post(path, json=body))["param"] or "").startswith(param)


def test_the_state_of_the_server(shared: TestClient) -> None:
    assert shared.get("/health/").json() == {"status": "ok"}
    assert shared.get("/get_world_size").json() == shared.get("/get_world_size/").json()
    assert shared.get("/get_world_size/").json() == {"world_size": 1}
    found = shared.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert found["weight_transfer_config"] is None
    assert found["model_config"]["dtype"] in ("torch.float32", "torch.bfloat16")
    assert shared.post("/reset_prefix_cache/").json() == {"reset": True}
    assert shared.post("/close_communicator/").status_code == 200


@pytest.mark.parametrize("path", NEW_WEIGHTS)
def test_an_nccl_group_is_refused_with_the_ways_that_work(shared: TestClient, path: str) -> None:
    message = error_of(shared.post(path, json={"host": "0.0.0.0", "port": 1}), 501)["message"]
    assert path in message and "/update_weights" in message and "save_pretrained" in message


def test_the_cache_is_an_admins(make_context: MakeContext) -> None:
    app = create_app(make_context(api_key=("a", "b"), admin_api_key=("b",)))
    with TestClient(app) as api:
        assert api.get("/health/").status_code == 200
        assert api.post("/generate/", json={"prompts": [STORY]}).status_code == 401
        for key, status in (("a", 403), ("b", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert api.post("/reset_prefix_cache/", headers=headers).status_code == status


# ---- /inference/v1/generate --------------------------------------------------------------------


def test_tokens_in_and_tokens_out(shared: TestClient) -> None:
    expected = direct(STORY, max_tokens=8)
    ids = expected.prompt_token_ids
    found = tokens_of(shared, token_ids=ids, sampling_params=GREEDY)
    [choice] = found["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids and "text" not in choice
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert found["usage"]["completion_tokens"] == 8 and found["request_id"].startswith("gen-")
    assert "prompt_logprobs" not in found


def test_log_probabilities_name_tokens_by_id(shared: TestClient) -> None:
    ids = direct(STORY, max_tokens=1).prompt_token_ids
    sampling = {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 5, "min_tokens": 5}
    fields = {"logprobs": 2, "prompt_logprobs": 1}
    expected = completion(shared, ids, **sampling, **fields)
    found = tokens_of(shared, token_ids=ids, sampling_params=sampling | fields)
    assert found["prompt_logprobs"] == expected[0]["prompt_logprobs"]
    for mine, other in zip(found["choices"], expected, strict=True):
        content = mine["logprobs"]["content"]
        assert mine["token_ids"] == other["token_ids"]
        assert [each["token"] for each in content] == other["logprobs"]["tokens"]
        assert [each["logprob"] for each in content] == other["logprobs"]["token_logprobs"]
        assert all(len(each["top_logprobs"]) == 2 for each in content)


def test_a_stream_has_the_same_tokens(shared: TestClient) -> None:
    ids = direct(STORY, max_tokens=1).prompt_token_ids
    sampling = GREEDY | {"logprobs": 1, "prompt_logprobs": 0, "stream_interval": 3}
    whole = tokens_of(shared, token_ids=ids, sampling_params=sampling)
    body = {"token_ids": ids, "sampling_params": sampling, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    response = shared.post("/inference/v1/generate", json=body)
    *events, end = response.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len(chunks) > 1 and last["usage"]["completion_tokens"] == 8
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    [expected] = whole["choices"]
    assert sum((each["token_ids"] for each in choices), []) == expected["token_ids"]
    content = sum((each["logprobs"]["content"] for each in choices), [])
    assert content == expected["logprobs"]["content"]
    assert [chunk.get("prompt_logprobs") for chunk in chunks][0] == whole["prompt_logprobs"]
    assert choices[-1]["finish_reason"] == "length"


def test_scoring_alone_generates_nothing(shared: TestClient) -> None:
    ids = direct(STORY, max_tokens=1).prompt_token_ids
    found = tokens_of(
        shared, token_ids=ids, sampling_params={"max_tokens": 0, "prompt_logprobs": 0}
    )
    assert found["choices"][0]["token_ids"] == [] and len(found["prompt_logprobs"]) == len(ids)


def test_unknown_parameters_are_named(shared: TestClient) -> None:
    body = {"token_ids": [5], "sampling_params": GREEDY | {"strange": 1, "output_kind": 2}}
    response = shared.post("/inference/v1/generate", json=body)
    assert response.headers["X-Quire-Ignored-Fields"] == "sampling_params.strange"


@pytest.mark.parametrize(
    "strange", [{"stream": True}, {"return_token_ids": True}, {"priority": "a"}, {"echo": True}]
)
def test_unknown_parameters_with_names_of_other_fields_do_nothing(
    shared: TestClient, strange: dict[str, Any]
) -> None:
    [name] = strange
    body = TRL_BODIES["/generate/"] | {"temperature": 0.0}
    response = shared.post("/generate/", json=body | {"generation_kwargs": strange})
    assert response.status_code == 200, response.text
    assert response.headers["X-Quire-Ignored-Fields"] == f"generation_kwargs.{name}"
    assert response.json() == answered(shared, "/generate/", **body)


def test_sampling_parameters_cannot_replace_the_prompt(shared: TestClient) -> None:
    body = {"token_ids": [5, 6, 7]}
    found = tokens_of(shared, **body, sampling_params=GREEDY | {"prompt": [1]})
    expected = tokens_of(shared, **body, sampling_params=GREEDY)
    assert found["choices"] == expected["choices"]

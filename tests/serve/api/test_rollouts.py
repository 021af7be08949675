"""Routes for trainers: TRL's server and vLLM's /inference/v1/generate, compared with the engine
and with OpenAI's endpoints.

Covers `serve/rollouts/as_requests.py`, `serve/rollouts/protocol.py`, `serve/rollouts/tokens.py`,
`serve/rollouts/trl.py` and `serve/rollouts/trl_writer.py`.
"""

import base64
import io
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx2 as httpx
import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from quire.base.requests.numerics import fingerprint
from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.serve.app import create_app
from quire.serve.bodies.logprobs_json import TokenNames
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.errors import ApiError
from quire.serve.pipeline.answer import Answer, UsageCounter
from quire.serve.pipeline.text import TextChoice
from quire.serve.rollouts.as_requests import DEFAULTS, sequences_completion
from quire.serve.rollouts.protocol import SequencesBody
from quire.serve.rollouts.tokens import TokensChoice
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
    """An app shared by the tests that do not change it."""
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


def test_trl_generate_matches_completions(shared: TestClient) -> None:
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


def test_trl_chat_matches_chat_completions(shared: TestClient) -> None:
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
def test_missing_parameters_get_trls_defaults(shared: TestClient, path: str) -> None:
    ignoring = {"generation_kwargs": {"seed": 1, "ignore_eos": True}}
    found = answered(shared, path, **TRL_BODIES[path], **ignoring)
    same = answered(shared, path, **TRL_BODIES[path], **ignoring, **DEFAULTS)
    assert found == same and len(found["completion_ids"][0]) == DEFAULTS["max_tokens"]
    without_logprobs = answered(shared, path, **TRL_BODIES[path], **ignoring, logprobs=None)
    assert without_logprobs["logprobs"] is None and without_logprobs["logprob_token_ids"] is None
    assert without_logprobs["completion_ids"] == found["completion_ids"]


@pytest.mark.parametrize("path", TRL_BODIES)
def test_a_regex_constrains_the_tokens(shared: TestClient, path: str) -> None:
    body = TRL_BODIES[path] | {"structured_outputs_regex": "[0-9]{3}", "max_tokens": 20}
    [ids] = answered(shared, path, **body)["completion_ids"]
    text = answered(shared, "/detokenize", tokens=ids)["prompt"]
    assert text[:3].isdecimal()


@pytest.mark.parametrize("path", TRL_BODIES)
def test_long_parameters_are_limited_across_prompts(shared: TestClient, path: str) -> None:
    body: dict[str, list[Any]] = TRL_BODIES[path]
    many = {name: 128 * value for name, value in body.items()}
    choices = [f"{i:06}" * 20 for i in range(100)]
    for name, value in (
        ("allowed_token_ids", [5] * 5000),
        ("structured_outputs", {"choice": choices}),
    ):
        given = {"generation_kwargs": {name: value}, "max_tokens": 1}
        error = error_of(shared.post(path, json=many | given))
        assert error["param"] == name and "for each of 128 prompts" in error["message"]
        answered(shared, path, **body, **given)


def test_tools_reach_the_template(shared: TestClient) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    plain = answered(shared, "/chat/", messages=[HELLO], **GREEDY)["prompt_ids"]
    assert (
        answered(shared, "/chat/", messages=[HELLO], tools=[tool], **GREEDY)["prompt_ids"] != plain
    )


@pytest.mark.parametrize("shape", ["json", "binary"])
def test_sequence_logprobs_match_prompt_logprobs(shared: TestClient, shape: str) -> None:
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
        for offset, position in enumerate(choice["prompt_logprobs"][length:]):
            ranked = sorted((position or {}).values(), key=lambda each: each["rank"])
            values = [each["logprob"] for each in ranked]
            if shape == "json":
                assert found["logprobs"][row][offset] == values
                assert set(map(str, found["logprob_token_ids"][row][offset])) == set(position or {})
                continue
            tops, own = (
                array(found, name)[row, offset] for name in ("logprobs", "actual_logprobs")
            )
            token = sequences[row][length + offset]
            assert array(found, "actual_token_ids", np.int32)[row, offset] == token
            if position is None:
                assert np.isinf(tops).all() and np.isinf(own).all()
            else:
                assert tops.tolist() == np.float32(values[:num]).tolist()
                assert own == np.float32(position[str(token)]["logprob"])


@pytest.mark.parametrize("shape", ["json", "binary"])
def test_top_logprobs_defaults_to_the_servers_limit(shared: TestClient, shape: str) -> None:
    body = {"sequences": [[5, 6, 7]], "prompt_lengths": [1], "response_format": shape}
    found = answered(shared, "/get_sequence_logprobs/", **body)
    assert found == answered(shared, "/get_sequence_logprobs/", **body, top_logprobs=20)
    error = error_of(shared.post("/get_sequence_logprobs/", json=body | {"top_logprobs": 21}))
    assert error["param"] == "top_logprobs" and "max_logprobs=20" in error["message"]


@pytest.mark.parametrize("limit", [-1, 20])
def test_total_number_of_logprobs_is_limited(make_context: MakeContext, limit: int) -> None:
    ready = make_context().client.ready
    ready = msgspec.structs.replace(ready, max_logprobs=limit, vocab_size=1000)
    body = SequencesBody(sequences=[[1, 2]], prompt_lengths=[0], top_logprobs=None)
    largest = {"sequences": [[1] * 1000, [1]], "prompt_lengths": [0, 0]}
    if limit == -1:
        body = body.model_copy(update={"top_logprobs": 2**31 - 1})
        assert sequences_completion(body, ready).prompt_logprobs == 1000
        many = body.model_copy(update=largest | {"sequences": [[1] * 5000, [1]]})
    else:
        lists = {"sequences": [[1] * 2000] * 256, "prompt_lengths": [0] * 256}
        many = body.model_copy(update=lists)
    with pytest.raises(ApiError, match="Send fewer sequences"):
        sequences_completion(many, ready)
    assert sequences_completion(body.model_copy(update=largest), ready).prompt_logprobs


@pytest.mark.parametrize("path", [*TRL_BODIES, "/get_sequence_logprobs/"])
def test_an_aborted_request_is_an_error(
    shared: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def aborted(answer: Answer) -> dict[str, Any]:
        return {"choices": [{"finish_reason": "abort", "logprobs": None, "prompt_logprobs": []}]}

    monkeypatch.setattr(Answer, "whole", aborted)
    scored = {"sequences": [[5, 6]], "prompt_lengths": [0]}
    response = shared.post(path, json=TRL_BODIES.get(path, scored))
    assert error_of(response, 503)["code"] == "aborted"


@pytest.mark.parametrize(("reason", "shown"), [("abort", "abort"), ("stop", "length")])
def test_max_tokens_zero_reports_length_unless_aborted(reason: Any, shown: str) -> None:
    completion = CompletionRequest.model_construct(prompt=[5], max_tokens=0)
    names = TokenNames(None, as_ids=True)
    ended = CompletionOutput(0, "a", [7], None, None, reason)
    output = RequestOutput("one", None, [5], None, [ended], True)
    for choice in (
        TokensChoice(0, completion, UsageCounter(1), names),
        TextChoice(UsageCounter(1), None, completion),
    ):
        [found] = choice.whole(output, ended)["choices"]
        assert (found["token_ids"], found["finish_reason"]) == ([], shown)


def test_only_an_ended_choice_has_routed_experts() -> None:
    completion = CompletionRequest.model_construct(prompt=[5], max_tokens=2)
    choice = TokensChoice(0, completion, UsageCounter(1), TokenNames(None, as_ids=True))
    running, ended = CompletionOutput(0, "a", [7]), CompletionOutput(0, "b", [8])
    ended.routed_experts = np.array([[[1, 2], [0, 3]], [[-1, -1], [2, 1]]], np.int16)
    output = RequestOutput("one", None, [5], None, [ended], True)
    [first] = choice.whole(output, running)["choices"]
    [last] = choice.whole(output, ended)["choices"]
    assert "routed_experts" not in first
    found = np.load(io.BytesIO(base64.b64decode(last["routed_experts"])), allow_pickle=False)
    assert found.dtype == np.int16 and (found == ended.routed_experts).all()


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
        ("/generate/", {"prompts": [STORY * 600]}, "prompts"),
        ("/get_sequence_logprobs/", {"sequences": [[1 << 30]], "prompt_lengths": [0]}, "sequences"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1 << 30]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5] * 600}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5], "features": {"mm_hashes": {}}}, "features"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"extra_args": {"a": 1}}},
         "extra_args"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused(
    shared: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(shared.post(path, json=body))
    assert (error["param"] or "").startswith(param)
    assert "truncate_prompt_tokens" not in error["message"], "these bodies have no such field"


def test_trl_server_routes_report_state_and_reset_the_cache(shared: TestClient) -> None:
    assert shared.get("/health/").json() == {"status": "ok"}
    assert shared.get("/get_world_size").json() == shared.get("/get_world_size/").json()
    assert shared.get("/get_world_size/").json() == {"world_size": 1}
    found = shared.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert found["weight_transfer_config"] is None
    assert found["model_config"]["dtype"] in ("torch.float32", "torch.bfloat16")
    assert shared.post("/reset_prefix_cache/").json() == {"reset": True}
    assert shared.post("/close_communicator/").status_code == 200


@pytest.mark.parametrize("path", NEW_WEIGHTS)
def test_nccl_weight_transfer_is_refused_with_alternatives(shared: TestClient, path: str) -> None:
    message = error_of(shared.post(path, json={"host": "0.0.0.0", "port": 1}), 501)["message"]
    assert path in message and "/update_weights" in message and "save_pretrained" in message


def test_cache_reset_needs_an_admin_key(make_context: MakeContext) -> None:
    app = create_app(make_context(api_key=("a", "b"), admin_api_key=("b",)))
    with TestClient(app) as api:
        assert api.get("/health/").status_code == 200
        assert api.post("/generate/", json={"prompts": [STORY]}).status_code == 401
        for key, status in (("a", 403), ("b", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert api.post("/reset_prefix_cache/", headers=headers).status_code == status


# ---- /inference/v1/generate --------------------------------------------------------------------


def test_generate_takes_and_returns_token_ids(shared: TestClient) -> None:
    expected = direct(STORY, max_tokens=8)
    ids = expected.prompt_token_ids
    found = tokens_of(shared, token_ids=ids, sampling_params=GREEDY)
    [choice] = found["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids and "text" not in choice
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert found["usage"]["completion_tokens"] == 8 and found["request_id"].startswith("gen-")
    assert "prompt_logprobs" not in found


def test_logprobs_name_tokens_by_id(shared: TestClient) -> None:
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


def test_stream_has_the_same_tokens_and_logprobs(shared: TestClient) -> None:
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


def test_max_tokens_zero_returns_only_prompt_logprobs(shared: TestClient) -> None:
    ids = direct(STORY, max_tokens=1).prompt_token_ids
    found = tokens_of(
        shared, token_ids=ids, sampling_params={"max_tokens": 0, "prompt_logprobs": 0}
    )
    assert found["choices"][0]["token_ids"] == [] and len(found["prompt_logprobs"]) == len(ids)


def test_unknown_sampling_parameters_are_named_in_a_header(shared: TestClient) -> None:
    body = {"token_ids": [5], "sampling_params": GREEDY | {"strange": 1, "output_kind": 2}}
    response = shared.post("/inference/v1/generate", json=body)
    assert response.headers["X-Quire-Ignored-Fields"] == "sampling_params.strange"


@pytest.mark.parametrize(
    "unknown", [{"stream": True}, {"return_token_ids": False}, {"priority": "a"}, {"echo": True},
                {"prompt": [1]}],
)  # fmt: skip
def test_completions_fields_are_not_sampling_parameters(
    shared: TestClient, unknown: dict[str, Any]
) -> None:
    for path, body, field in (
        ("/generate/", {"prompts": [STORY], "temperature": 0}, "generation_kwargs"),
        ("/inference/v1/generate", {"token_ids": [5]}, "sampling_params"),
    ):
        known = {"temperature": 0}
        expected = answered(shared, path, **body, **{field: known})
        response = shared.post(path, json=body | {field: known | unknown})
        assert response.headers["X-Quire-Ignored-Fields"] == f"{field}.{next(iter(unknown))}"
        found = response.json()
        for name in ("completion_ids", "logprobs", "choices"):
            assert found.get(name) == expected.get(name)


@pytest.mark.parametrize("is_stream", [False, True])
def test_fingerprint_is_taken_when_generation_starts(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """Not at the request's arrival: it may wait until new weights are in use."""
    context = make_context()
    client, generate = context.client, context.client.generate
    old = client.ready
    names = [{**old.numerics, "weights": name} for name in ("new", "later")]
    new, later = (msgspec.structs.replace(old, numerics=each) for each in names)

    async def waiting(*args: Any) -> AsyncGenerator[Any, None]:
        monkeypatch.setattr(client, "ready", new)
        async for output in generate(*args):
            yield output
            if is_stream:
                monkeypatch.setattr(client, "ready", later)

    monkeypatch.setattr(client, "generate", waiting)
    usage = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    with TestClient(create_app(context)) as api:
        for path, body in (
            ("/v1/completions", {"prompt": [5], **GREEDY}),
            ("/v1/chat/completions", {"messages": HELLO, **GREEDY}),
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": GREEDY}),
        ):
            monkeypatch.setattr(client, "ready", old)
            text = api.post(path, json=body | usage).text
            lines = text.split("\n\n")[:-2] if is_stream else [text]
            found = [json.loads(line.removeprefix("data: ")) for line in lines]
            assert {each["system_fingerprint"] for each in found} == {fingerprint(new.numerics)}
            assert len(found) > 2 or not is_stream

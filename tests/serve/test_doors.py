"""Every door (entry point) of the engine rejects a bad request with the same error code.

The scheduler never sees such a request.

A new field goes to `tests/support/serve/bad_requests.py`, a new door to
`tests/support/serve/doors.py`. Covers `engine/client/admission.py`.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import UNSUPPORTED, RequestError
from quire.base.messages import Hold, Request
from quire.base.settings.kv_transfer import KVTransfer
from quire.serve.bodies.protocol import ChatCompletionRequest, CompletionRequest
from quire.serve.native.document import document
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.serve.bad_requests import (
    CASES,
    HARMLESS,
    MAX_LOGPROBS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    POOLING_CASES,
    WRONG,
    Case,
)
from tests.support.serve.doors import (
    BODIES,
    MODEL,
    App,
    Door,
    Refusal,
    async_doors,
    http_doors,
    llm_doors,
    llm_pooling_doors,
    pooling_doors,
)
from tests.support.serve.fake_client import FakeClient

# Routes that add no request to the engine, or that are another door's second name.
NO_DOORS = {
    "/tokenize": "computes nothing in the engine",
    "/detokenize": "computes nothing in the engine",
    "/v1/messages/count_tokens": "computes nothing in the engine",
    "/ping": "reports whether the server is alive",
    "/reset_prefix_cache": "an operator's call",
    "/abort_requests": "an operator's call",
    "/v1/load_lora_adapter": "an operator's call, which sends a request of one token",
    "/v1/unload_lora_adapter": "an operator's call",
    "/lora-adapters": "an operator's call, which sends a request of one token",
    "/pause": "an operator's call",
    "/resume": "an operator's call",
    "/sleep": "an operator's call",
    "/wake_up": "an operator's call",
    "/init_weight_transfer_engine": "a trainer's call, which computes nothing",
    "/start_weight_update": "a trainer's call, which computes nothing",
    "/update_weights": "a trainer's call: weights are no request",
    "/update_weights/chunk": "a trainer's call: weights are no request",
    "/finish_weight_update": "a trainer's call: weights are no request",
    "/generate/": "TRL's: the body becomes one of /v1/completions",
    "/chat/": "TRL's: each conversation becomes a body of /v1/chat/completions",
    "/get_sequence_logprobs/": "TRL's: the body becomes one of /v1/completions",
    "/inference/v1/generate": "the body becomes one of /v1/completions",
    "/reset_prefix_cache/": "an operator's call",
    "/close_communicator/": "a trainer's call, which does nothing",
    "/v1/files": "the lines of a batch are sent to the routes above, as these tests do it",
    "/v1/batches": "the lines of a batch are sent to the routes above, as these tests do it",
    "/v1/batches/{batch_id}/cancel": "ends requests",
    "/v1/responses/{response_id}/cancel": "ends a request",
    "/v1/requests/{request_id}/rewind": "changes a retained request",
    "/v1/requests/{request_id}/keep": "changes a retained request",
    "/api/show": "computes nothing in the engine",
    "/api/pull": "computes nothing in the engine",
    "/api/create": "always refused",
    "/api/copy": "always refused",
    "/api/push": "always refused",
    "/apply-template": "computes nothing in the engine",
    "/props": "always refused",
    "/slots/{slot_id}": "always refused",
    "/completions": "/completion",
    "/flush_cache": "an operator's call",
    "/infill": "/completion, by the same code; this model has no tokens for it",
    "/reranking": "/rerank",
    "/score": "/v1/score",
    "/v1/rerank": "/rerank",
    "/v2/rerank": "/rerank",
    "/classify": "/v1/embeddings, by the same code; this model has no classes",
}
FIELDS = {name for case in CASES for name in case.fields}
POOLING_FIELDS = {name for case in POOLING_CASES for name in case.fields}


@dataclass(frozen=True)
class ServedEngine:
    """An engine with all its doors."""

    llm: LLM
    doors: list[Door]
    app: App
    client: FakeClient
    added: list[Request]
    runner: asyncio.Runner

    def state(self) -> tuple[object, ...]:
        """Return everything that a rejected request must leave unchanged."""
        core = self.llm.engine.client.core
        view = core.view()
        return (
            len(self.added), core.requests(), view.num_free_blocks, len(core.prefixes()),
            sorted(held.id for held in core.held()),
        )  # fmt: skip


def watched(llm: LLM) -> list[Request]:
    """Return a list that grows by each request that reaches the scheduler."""
    core, added = llm.engine.client.core, list[Request]()

    class Watch:
        def __getattr__(self, name: str) -> object:
            return getattr(core.scheduler, name)

        def add(self, request: Request, now: float) -> object:
            added.append(request)
            return core.scheduler.add(request, now)

    core.doors = Watch()  # type: ignore[assignment]
    return added


def retain_request(app: App) -> str:
    """Retain a request; return its id."""
    response = app.post("/v1/completions", {"prompt": "fox", "max_tokens": 2, "keep_s": 3600})
    return str(json.loads(response)["id"])


@pytest.fixture(scope="module")
def served() -> Iterator[ServedEngine]:
    settings = {"max_num_seqs": MAX_NUM_SEQS, "max_logprobs": MAX_LOGPROBS}
    with (
        LLM("demo", max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=4 << 20,
            disable_log_stats=True, **settings) as llm,
        asyncio.Runner() as runner,
    ):  # fmt: skip
        added, client = watched(llm), FakeClient(llm.engine)
        app = App(client, runner)
        doors = http_doors(app, retain_request(app))
        doors += llm_doors(llm) + async_doors(llm, client, runner)
        yield ServedEngine(llm, doors, app, client, added, runner)


@pytest.fixture(scope="module")
def served_pooling() -> Iterator[ServedEngine]:
    with (
        LLM(str(pooling_checkpoint("embed")), max_model_len=MAX_MODEL_LEN,
            kv_cache_memory_bytes=4 << 20, disable_log_stats=True) as llm,
        asyncio.Runner() as runner,
    ):  # fmt: skip
        added, client = watched(llm), FakeClient(llm.engine)
        app = App(client, runner)
        doors = pooling_doors(app) + llm_pooling_doors(llm, client, runner)
        yield ServedEngine(llm, doors, app, client, added, runner)


def wrong(door: Door, case: Case, found: Refusal | None) -> str:
    """Return how a refusal differs from what the case requires, or "" if it does not."""
    if found is None:
        return "accepted"
    if not found.message.endswith((".", "...")):
        return f"no sentence: {found.message}"
    wanted = {door.own_name(case.blamed), case.blamed}
    if case.blamed == "prompt_token_ids":
        wanted.add("prompt")  # the engine calls both of them "prompt"
    got, due = (found.status, found.code), (case.status, case.code)
    if not door.has_params:
        got, due = (found.status, None), (case.status, None)
    elif found.param not in wanted:
        return f"blames {found.param!r}: {found.message}"
    return "" if got == due else f"{got}: {found.message}"


def named(served: ServedEngine, *names: str) -> list[Door]:
    return [door for door in served.doors if door.name in names]


def refuse(served: ServedEngine, case: Case) -> None:
    """Send the case to every door that can express it."""
    doors = [
        door for door in served.doors
        if not case.fields.keys() & door.cannot.keys() and case.name not in door.fits
        and not (case.bounds and door.is_python)
    ]  # fmt: skip
    try_all(served, doors, case)


def try_all(served: ServedEngine, doors: list[Door], case: Case) -> None:
    before, faults = served.state(), []
    assert doors, "no door can express it"
    for door in doors:
        fault = wrong(door, case, door.refusal(case.fields))
        if served.state() != before:
            fault += " and changed the engine's state"
        if fault:
            faults.append(f"{door.name}: {fault}")
    assert not faults


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_doors_reject_a_bad_request_alike(served: ServedEngine, case: Case) -> None:
    refuse(served, case)


@pytest.mark.parametrize("case", POOLING_CASES, ids=str)
def test_all_pooling_doors_reject_a_bad_request_alike(
    served_pooling: ServedEngine, case: Case
) -> None:
    refuse(served_pooling, case)


OPEN_CASES = [
    Case(f"open prompt with {name}", fields, name, UNSUPPORTED)
    for name, fields in {
        "n": {"n": 2, "temperature": 1.0},
        "best_of": {"best_of": 2, "temperature": 1.0},
        "use_beam_search": {"use_beam_search": True},
        "prompt_logprobs": {"prompt_logprobs": 1},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
    }.items()
]


@pytest.mark.parametrize("case", OPEN_CASES, ids=str)
def test_open_prompt_rejects_unsupported_parameters(served: ServedEngine, case: Case) -> None:
    try_all(served, named(served, "stream", "AsyncLLM.pieces"), case)


@pytest.mark.parametrize(
    "case",
    [
        Case("n in a session", {"n": 2, "temperature": 1.0}),
        Case("best_of in a session", {"best_of": 2, "temperature": 1.0}),
        Case("beams in a session", {"use_beam_search": True, "n": 2, "temperature": 1.0}, "n"),
    ],
    ids=str,
)
def test_session_rejects_several_outputs(served: ServedEngine, case: Case) -> None:
    try_all(served, named(served, "LLM.session", "AsyncLLM.session"), case)


def test_asyncllm_rejects_logits_processors(served: ServedEngine) -> None:
    case = Case("function", {"logits_processors": [lambda ids, logits: logits]})
    try_all(served, [door for door in served.doors if door.name.startswith("AsyncLLM.")][:3], case)


@pytest.mark.parametrize("is_pooling", [False, True])
def test_doors_of_the_other_kind_of_model_reject_all(
    served: ServedEngine, served_pooling: ServedEngine, is_pooling: bool
) -> None:
    each = served_pooling if is_pooling else served
    others: list[Door]
    if is_pooling:
        others = [
            *http_doors(each.app, "nothing"), *llm_doors(each.llm),
            *async_doors(each.llm, each.client, each.runner),
        ]  # fmt: skip
        others = [door for door in others if door.name not in ("fork", "append", "LLM.chat")]
    else:
        others = [
            *pooling_doors(each.app), *llm_pooling_doors(each.llm, each.client, each.runner),
        ]  # fmt: skip
    try_all(each, others, WRONG)


def http(served: ServedEngine, **server: Any) -> Iterator[tuple[App, list[Door]]]:
    """Yield an app of the same engine with other settings, and its doors."""
    app = App(served.client, served.runner, **server)
    held_id = retain_request(app)
    yield app, http_doors(app, held_id)
    served.llm.engine.client.core.control(Hold(f"{held_id}-0", 0.0))


def test_only_urgent_keys_may_raise_the_priority(served: ServedEngine) -> None:
    case = Case("hurry", {"priority": -1}, code="priority_not_allowed", status=403)
    keys = {"api_key": ("urgent", "plain"), "urgent_api_key": ("urgent",)}
    for app, doors in http(served, key="plain", **keys):
        try_all(served, [door for door in doors if "priority" not in door.cannot], case)
        app.key = "urgent"
        assert doors[0].refusal(case.fields) is None


def test_draining_server_rejects_requests(served: ServedEngine) -> None:
    for app, doors in http(served):
        app.context.draining = True
        try_all(served, doors, Case("late", {}, param="", code="draining", status=503))


def test_all_doors_accept_a_valid_request(
    served: ServedEngine, served_pooling: ServedEngine
) -> None:
    for each in (served, served_pooling):
        for door in each.doors:
            before = len(each.added)
            assert door.refusal({}) is None, door
            assert len(each.added) > before, door


IMAGE = "data:image/png;base64,iVBORw0KGgo="
WITH_IMAGES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": IMAGE}}]}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": IMAGE}]}]}),
    ("/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
    ]}]}),
]  # fmt: skip


def test_model_without_vision_tower_rejects_images(served: ServedEngine) -> None:
    before = served.state()
    for path, body in WITH_IMAGES:
        refused = served.app.post(path, body)
        assert isinstance(refused, Refusal) and refused.status == 400
        assert "does not accept images" in refused.message
    prompt = {"prompt": "fox", "multi_modal_data": {"image": Image.new("RGB", (28, 28))}}
    for door in served.doors:
        if door.is_python and door.name != "LLM.chat":
            found = door.refusal(prompt)
            assert found is not None and "does not accept images" in found.message, door
    assert served.state() == before


# Valid values, and what the scheduler gets for them.
REACHES: list[tuple[str, Any, Callable[[Request], Any], Any]] = [
    ("cache_salt", "mine", lambda request: request.cache_salt, "mine"),
    ("priority", 3, lambda request: request.priority, 3),
    ("timeout_s", 50.0, lambda request: request.timeout_s, 50.0),
    ("tenant", "me", lambda request: request.tenant, "me"),
    ("keep_s", 5.0, lambda request: request.keep_s, 5.0),
    ("ttl_s", 5.0, lambda request: request.pin_s, 5.0),
    ("pin_share", 0.5, lambda request: request.pin_share, 0.5),
    ("seed", 7, lambda request: request.seed, 7),
    ("stop_token_ids", [7], lambda request: 7 in request.stop_token_ids, True),
    ("bad_words", ["fox"], lambda request: len(request.bad_words_token_ids) > 0, True),
    ("structured_outputs", {"regex": "a+"}, lambda request: request.grammar != "", True),
    ("kv_transfer_params", {"do_remote_decode": True}, lambda request: request.kv_transfer,
     KVTransfer(keeps=True)),
    ("min_tokens", 2, lambda request: request.params.min_tokens, 2),
    ("temperature", 0.5, lambda request: request.params.temperature, 0.5),
    ("top_p", 0.5, lambda request: request.params.top_p, 0.5),
    ("logit_bias", {5: 1.0}, lambda request: request.params.logit_bias, {5: 1.0}),
    ("allowed_token_ids", [5, 6], lambda request: request.params.allowed_token_ids, [5, 6]),
    ("xtc_probability", 0.5, lambda request: request.params.xtc_probability, 0.5),
    ("dry_multiplier", 0.5, lambda request: request.params.dry_multiplier, 0.5),
]  # fmt: skip


@pytest.mark.parametrize("number", range(5))
def test_every_door_passes_each_field_to_the_scheduler(served: ServedEngine, number: int) -> None:
    """Each request sets several of the fields."""
    for door in served.doors:
        given = [each for each in REACHES[number::5] if reaches(door, each[0])]
        temperature = {} if "temperature" in door.cannot else {"temperature": 1.0}
        fields = {name: value for name, value, *_ in given}
        assert door.refusal(temperature | fields) is None, door
        request = served.added[-1]
        for name, _, read, wanted in given:
            assert read(request) == wanted, (door, name)
        served.llm.engine.client.core.control(Hold(request.request_id, 0.0))


def reaches(door: Door, name: str) -> bool:
    """Return whether a door has the field; a continued request inherits its parent's salt."""
    return name not in door.cannot and (name != "cache_salt" or door.name not in ("fork", "append"))


def test_session_piece_cannot_change_the_cache_salt(served: ServedEngine) -> None:
    with served.llm.session(cache_salt="mine") as begun:
        begun.append({"prompt": "fox", "cache_salt": "mine"})
        with pytest.raises(RequestError, match="whole session") as raised:
            begun.append({"prompt": "fox", "cache_salt": "other"})
        assert raised.value.field == "cache_salt"


def test_cases_are_many_and_have_unique_names() -> None:
    assert len(CASES) >= 80
    assert len({case.name for case in CASES}) == len(CASES)


def test_each_door_names_every_field_or_gives_a_reason(
    served: ServedEngine, served_pooling: ServedEngine
) -> None:
    for each, fields in ((served, FIELDS), (served_pooling, POOLING_FIELDS)):
        for door in each.doors:
            body = BODIES.get(door.name)
            if body is None:
                continue
            known = {*body.model_fields, "data_parallel_rank"}
            lost = {
                name for name in fields - door.cannot.keys() if door.own_name(name) not in known
            }
            assert not lost, f"{door.name}: give a name or a reason for {lost}"


def test_each_request_field_has_a_case_or_a_reason() -> None:
    known = {
        *SamplingParams.__struct_fields__,
        *CompletionRequest.model_fields,
        *ChatCompletionRequest.model_fields,
    }
    own_names = {"max_completion_tokens", "top_logprobs", "messages", "extra_args"}
    unknown = known - FIELDS - HARMLESS.keys() - own_names
    assert not unknown, "give each a bad value in bad_requests.CASES, or a reason in HARMLESS"
    assert not HARMLESS.keys() & FIELDS


def test_each_route_is_a_door_or_has_a_reason(
    served: ServedEngine, served_pooling: ServedEngine
) -> None:
    paths = document(served.app.app)["paths"]
    posts = {path for path, operations in paths.items() if "post" in operations}
    doors = {door.path for door in (*served.doors, *served_pooling.doors) if door.path}
    assert posts - doors - NO_DOORS.keys() == set(), "add a door, or a reason to NO_DOORS"
    assert doors - posts == {"/v1/stream"}, "WebSockets are not in the document"


def test_each_python_call_with_a_prompt_is_a_door(
    served: ServedEngine, served_pooling: ServedEngine
) -> None:
    takes = {"prompt", "prompts", "messages", "data_1", "keep_s"}
    calls = {
        f"{kind.__name__}.{name}"
        for kind in (LLM, AsyncLLM)
        for name, call in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and inspect.signature(call).parameters.keys() & takes
    }
    doors = {door.name for door in (*served.doors, *served_pooling.doors) if door.is_python}
    # Classes are pooled by the code of `encode`; pieces are a way to call `generate`.
    assert calls - {"LLM.classify"} == doors - {"AsyncLLM.pieces"}

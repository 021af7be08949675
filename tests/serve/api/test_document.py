"""The server obeys its own OpenAPI document. Thousands of requests, valid and invalid ones, get
responses that the document allows, and never a 5xx.

Covers `serve/bodies/schemas.py`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.processes.servers import Server

PROMPTS = ("prompt", "messages", "tokens", "input")
REQUIRED = {"POST /v1/messages": ("max_tokens",)}  # in addition to prompts
GENERATING = ("completions", "chat/completions", "responses", "messages", "prefixes")
NUM_PARTS = 8  # test cases, each with every eighth operation
# The live stream ends only with the server. After a pause, all other requests wait.
EXCLUDED = ("GET /v1/engine/live", "POST /pause")
WITH_BODY, WITHOUT = 120, 60  # examples of an operation; with a body also of invalid requests
CONVERSATIONS = 70  # examples of a body with messages; creating one takes up to 0.6 s
AS_GENERATED = 0.25  # share of valid conversations that keep all messages; others keep one text
SCHEMA_S = 60.0  # timeout of the document, which the server creates at the first request


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a short context, so that all answers are short."""
    kept = tmp_path_factory.mktemp("kept")
    server = Server("--max-num-seqs", "16", "--max-model-len", "64", "--files-dir", str(kept))
    yield server
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_server_obeys_its_openapi_document(server: Server, part: int) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=SCHEMA_S)
    statuses: Counter[int] = Counter()
    generated: Counter[str] = Counter()
    for number, found in enumerate(schema.get_all_operations()):
        operation = found.ok()
        if operation.label in EXCLUDED or number % NUM_PARTS != part:
            continue
        for is_allowed in (True, False) if len(operation.body) else (True,):
            counts: Counter[int] = Counter()
            try_all(operation, is_allowed, counts)
            statuses += counts
            generated[operation.label] += counts[200]
            print(operation.label, "allowed" if is_allowed else "not allowed", dict(counts))
    assert sum(statuses.values()) >= 5000 // NUM_PARTS, statuses
    assert statuses[400] >= 500 // NUM_PARTS, statuses
    generating = [f"POST /v1/{path}" for path in GENERATING]
    assert set(generating) <= {each.ok().label for each in schema.get_all_operations()}
    for label in set(generating) & generated.keys():
        assert generated[label] >= 20, generated
    assert server.get("/health") == 200


def try_all(operation: Any, is_allowed: bool, statuses: Counter[int]) -> None:
    """Send generated requests. Raises schemathesis's error for the first forbidden response."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    all_checks = [
        not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_headers_conformance, checks.response_schema_conformance,
    ]  # fmt: skip
    mode = GenerationMode.POSITIVE if is_allowed else GenerationMode.NEGATIVE

    @seed(1)
    @settings(
        max_examples=num_examples(operation),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 3), st.integers())
    def try_one(case: Any, most: int, number: int) -> None:
        if is_allowed and isinstance(case.body, dict):
            kept = PROMPTS + REQUIRED.get(operation.label, ())
            case.body = thinned(case.body, kept, most, Random(number))
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=all_checks)

    try_one()


def num_examples(operation: Any) -> int:
    if not len(operation.body):
        return WITHOUT
    has_messages = any("'messages': {" in str(each.raw_schema) for each in operation.body)
    return CONVERSATIONS if has_messages else WITH_BODY


def thinned(body: dict[str, Any], kept: Sequence[str], most: int, random: Random) -> dict[str, Any]:
    """Return the kept fields and a few others, because one refused field hides all others.

    The demo model accepts no images, so messages keep only their text parts, if there are any. Most
    conversations are cut to one message with a text, so that the model generates tokens.
    """
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            texts = [part for part in message["content"] if is_text(part)]
            message["content"] = texts or message["content"]
    if isinstance(messages, list) and messages and random.random() >= AS_GENERATED:
        [message, *_] = [each for each in messages if has_text(each)] or messages
        body["messages"] = [plain(message)]
    if body.get("prompt") is not None:
        body.pop("messages", None)
    names = [name for name in body if name not in kept]
    some = {*kept, *random.sample(names, min(most, len(names)))}
    return {name: value for name, value in body.items() if name in some}


def has_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    is_list = isinstance(content, list)
    return bool(content) and (all(map(is_text, content)) if is_list else isinstance(content, str))


def plain(message: Any) -> Any:
    """Return a message with nothing but its role and a text; a list of messages stays."""
    if not isinstance(message, dict):
        return message
    content = message["content"] if has_text(message) else "Hi"
    return {"role": message.get("role", "user"), "content": content}


def is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"

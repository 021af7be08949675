"""The server keeps to its own document: thousands of requests made from it, and from what it does
not allow, get answers that it allows, and none a 5xx."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.processes import Server

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_headers_conformance, response_schema_conformance,
]  # fmt: skip
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
WITH_BODY, WITHOUT = 440, 60  # examples of an operation in each mode


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Answers are short, whatever length is asked for."""
    server = Server("--max-num-seqs", "16", "--max-model-len", "64")
    yield server
    assert server.stop() == 0


@pytest.mark.slow
def test_the_server_keeps_to_its_document(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        takes_something = len(operation.body) or list(operation.iter_parameters())
        for mode in MODES if takes_something else MODES[:1]:
            try_all(operation, mode, statuses)
    print(statuses)
    assert sum(statuses.values()) >= 5000
    assert statuses[200] >= 500 and statuses[400] >= 500
    assert server.get("/health") == 200


def try_all(operation: Any, mode: GenerationMode, statuses: Counter[int]) -> None:
    """Raises what schemathesis raises for the first answer that is not allowed."""
    num_examples = WITH_BODY if len(operation.body) else WITHOUT

    @seed(1)
    @settings(
        max_examples=num_examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def try_one(case: Any) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    try_one()

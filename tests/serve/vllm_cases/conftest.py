"""One server of the demo model for all cases, and apps over tiny models that pool."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tests.serve.api.test_embeddings import serving_model
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.processes.servers import Server
from tests.support.serve.vllm_cases import Asked


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    server = Server("--max-num-seqs", "32")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def asked(demo: Server) -> Iterator[Asked]:
    asked = Asked(demo)
    yield asked
    asked.close()


TEMPLATE = """{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture(scope="session")
def embedder() -> Iterator[TestClient]:
    folder = pooling_checkpoint("embed")
    with serving_model(folder, max_model_len=64, chat_template=TEMPLATE) as app:
        yield app


@pytest.fixture(scope="session")
def classifier() -> Iterator[TestClient]:
    folder = pooling_checkpoint("classify")
    with serving_model(folder, max_model_len=64, chat_template=TEMPLATE) as app:
        yield app


@pytest.fixture(scope="session")
def scorer() -> Iterator[TestClient]:
    folder = pooling_checkpoint("llama_score", num_labels=1)
    with serving_model(folder, max_model_len=64) as app:
        yield app

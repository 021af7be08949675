"""TRL's client of vLLM's server: rollouts as tokens, log-probabilities, and new weights."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.clients.given import MESSAGES, SEED, Served
from tests.clients.vllm_stand_in import write_stand_in

SHORT: dict[str, Any] = {"max_tokens": 6, "generation_kwargs": {"seed": SEED, "min_tokens": 6}}
PROMPTS = ["Once upon a time", "The fox"]
DEMO = Path(__file__).parents[2] / "src" / "quire" / "demo"  # the served weights


@pytest.fixture(scope="session")
def make_client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("stand-in")
    write_stand_in(folder)
    sys.path.insert(0, str(folder))
    from trl.generation.vllm_client import VLLMClient

    return lambda server: VLLMClient(base_url=server.url.removesuffix("/v1"))


def plain(server: Served, path: str, **body: Any) -> Any:
    """Return the choices of a request without TRL."""
    own = {"max_tokens": 6, "min_tokens": 6, "seed": SEED, "temperature": 1, "top_p": 1, "top_k": 0}
    return server.post(path, body | own | {"return_token_ids": True})["choices"]


def test_prompts_are_continued(server: Served, make_client: Any) -> None:
    found = make_client(server).generate(PROMPTS, n=2, logprobs=2, **SHORT)
    expected = plain(server, "/v1/completions", prompt=PROMPTS, n=2)
    assert found["completion_ids"] == [each["token_ids"] for each in expected]
    assert found["prompt_ids"] == [each["prompt_token_ids"] for each in expected[::2]]
    for ids, values in zip(found["logprob_token_ids"], found["logprobs"], strict=True):
        assert all(len(each) in (2, 3) for each in ids) and len(values) == 6
    by_ids = make_client(server).generate(found["prompt_ids"], n=2, logprobs=2, **SHORT)
    assert by_ids == found


def test_conversations_are_answered(server: Served, make_client: Any) -> None:
    found = make_client(server).chat([MESSAGES, MESSAGES], logprobs=0, **SHORT)
    [expected] = plain(server, "/v1/chat/completions", messages=MESSAGES)
    assert found["completion_ids"] == [expected["token_ids"]] * 2
    assert all(math.isfinite(value) for row in found["logprobs"] for [value] in row)


def test_regex_constrains_the_tokens(server: Served, make_client: Any) -> None:
    made = make_client(server).generate(["A"], structured_outputs_regex="[0-9]{3}", max_tokens=9)
    text = server.post("/detokenize", {"tokens": made["completion_ids"][0]})["prompt"]
    assert text[:3].isdecimal()


def test_sequences_are_scored(server: Served, make_client: Any) -> None:
    """The scores equal the log-probabilities at sampling."""
    client = make_client(server)
    made = client.generate(PROMPTS, logprobs=0, **SHORT)
    pairs = zip(made["prompt_ids"], made["completion_ids"], strict=True)
    sequences = [prompt + completion for prompt, completion in pairs]
    lengths = [len(prompt) for prompt in made["prompt_ids"]]
    found = client.get_sequence_logprobs(sequences, lengths, top_logprobs=5)
    for sampled, scored in zip(made["logprobs"], found["actual_logprobs"], strict=True):
        for [value], [other] in zip(sampled, scored, strict=True):
            assert other in (pytest.approx(value, abs=1e-4), -math.inf)  # beyond the top 5


def test_new_weights_change_the_answers(demo: Served, make_client: Any) -> None:
    """The answers after an update with the same weights are equal, and the cache starts empty."""
    client = make_client(demo)
    assert client.get_world_size() == 1
    before = client.generate(PROMPTS, **SHORT)
    client.reset_prefix_cache()
    assert client.generate(PROMPTS, **SHORT) == before
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        client.init_communicator()

    order = {"path": str(DEMO), "weights_version": "again"}
    answer = requests.post(f"{client.base_url}/update_weights", json=order, timeout=60)
    assert answer.json() == {"message": "Weights updated", "weights_version": "again"}
    assert client.generate(PROMPTS, **SHORT) == before

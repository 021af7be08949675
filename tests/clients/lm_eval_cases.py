"""lm-eval: answers ranked by log-probabilities, judged texts, and perplexities. Local tasks run by
completions and chats, with the server's own tokenizer."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.given import Served

COMPLETIONS, CHATS = "local-completions", "local-chat-completions"
PATHS = {COMPLETIONS: "/v1/completions", CHATS: "/v1/chat/completions"}
ROWS = [
    {"text": "The fox", "choices": [" ran.", " seventeen"], "gold": 0},
    {"text": "A dog and", "choices": [" a cat", " qxz"], "gold": 0},
    {"text": "Once upon a", "choices": [" time", " xyz"], "gold": 0},
]
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
CHOICES = """\
output_type: multiple_choice
target_delimiter: ""
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXTS = """\
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks `choices`, `texts` and `rolling` over the same rows."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, kind in (("choices", CHOICES), ("texts", TEXTS), ("rolling", ROLLING)):
        config = COMMON.format(name=name, data=data)
        if name == "rolling":
            config = config.replace('doc_to_text: "{{text}}"\n', "")
        (tmp_path / f"{name}.yaml").write_text(config + kind)
    return tmp_path


def evaluated(server: Served, kind: str, tasks: Path, name: str, *more: str) -> list[Any]:
    """Run a task; return its samples in the order of the rows."""
    url = server.url.removesuffix("/v1") + PATHS[kind]
    given = f"model={server.model},base_url={url},num_concurrent=2,max_retries=1,timeout=60"
    out = tasks / "out"
    # fmt: off
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", given,
        "--tasks", name, "--include_path", str(tasks), "--output_path", str(out), "--log_samples",
        *more,
    ]
    # fmt: on
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    [found] = out.rglob(f"samples_{name}_*.jsonl")
    samples = [json.loads(line) for line in found.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def sum_of_logprobs(server: Served, ids: list[int], first: int) -> float:
    """Return the sum for a prompt's tokens from an index on, requested without lm-eval."""
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    [choice] = server.post("/v1/completions", body)["choices"]
    return math.fsum(choice["logprobs"]["token_logprobs"][first:])


def tokens(server: Served, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    found: list[int] = server.post("/tokenize", body)["tokens"]
    return found


def test_choices(server: Served, tasks: Path) -> None:
    """lm-eval ranks by sums that equal those of the server's log-probabilities."""
    for row, sample in zip(ROWS, evaluated(server, COMPLETIONS, tasks, "choices"), strict=True):
        context = tokens(server, str(row["text"]))
        for choice, response in zip(row["choices"], sample["filtered_resps"], strict=True):
            whole = tokens(server, f"{row['text']}{choice}")
            expected = sum_of_logprobs(server, whole, len(context))
            assert float(response[0]) == pytest.approx(expected, abs=1e-3)


def test_choices_of_a_model_that_knows(tasks: Path, server: Served) -> None:
    if server.model != "demo":
        pytest.skip("a model of random numbers knows nothing")
    assert all(sample["acc"] == 1 for sample in evaluated(server, COMPLETIONS, tasks, "choices"))


def test_texts(server: Served, tasks: Path) -> None:
    """Texts equal direct requests with the same prompts."""
    for row, sample in zip(ROWS, evaluated(server, COMPLETIONS, tasks, "texts"), strict=True):
        body = {"prompt": row["text"], "max_tokens": 6, "temperature": 0, "stop": ["\n"]}
        [choice] = server.post("/v1/completions", body)["choices"]
        assert sample["filtered_resps"][0].strip() == choice["text"].strip()


def test_texts_of_chats(server: Served, tasks: Path) -> None:
    found = evaluated(server, CHATS, tasks, "texts", "--apply_chat_template")
    for row, sample in zip(ROWS, found, strict=True):
        messages = [{"role": "user", "content": row["text"]}]
        body = {"messages": messages, "max_tokens": 6, "temperature": 0, "stop": ["\n"]}
        [choice] = server.post("/v1/chat/completions", body)["choices"]
        assert sample["filtered_resps"][0].strip() == choice["message"]["content"].strip()


def test_rolling(server: Served, tasks: Path) -> None:
    """Perplexities cover whole texts."""
    for sample in evaluated(server, COMPLETIONS, tasks, "rolling"):
        assert float(sample["word_perplexity"][0]) < 0

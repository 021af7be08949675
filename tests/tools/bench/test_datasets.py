"""Requests of each data set: lengths, texts, seeds, and invalid files."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.tools.bench.arguments import add_dataset_arguments
from quire.tools.bench.datasets import BenchRequest, make_requests


class LetterTokens:
    """One token per letter."""

    vocab_size = 50

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def requests(line: str, seed: int = 1) -> list[BenchRequest]:
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser, num_prompts=20, input_len=12, output_len=6)
    return make_requests(parser.parse_args(line.split()), LetterTokens(), seed)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--random-range-ratio 0.5 --random-prefix-len 3",
        "--dataset-name prefix_repetition",
        "--dataset-name sharegpt-like",
        "--dataset-name alpaca-like",
    ],
)
def test_seed_determines_the_requests(line: str) -> None:
    assert requests(line, 1) == requests(line, 1)
    assert requests(line, 1) != requests(line, 2)
    for request in requests(line):
        assert request.prompt_len == len(request.prompt)
        assert all(0 <= token < 50 for token in request.prompt)


def test_random_lengths_and_prefixes_follow_the_options() -> None:
    assert {(r.prompt_len, r.output_len) for r in requests("")} == {(12, 6)}
    assert {r.output_len for r in requests("--output-len 9 --input-len 4")} == {9}
    varied = requests("--num-prompts 500 --random-range-ratio 0.5")
    assert {r.prompt_len for r in varied} == set(range(6, 19))
    assert {r.output_len for r in varied} == set(range(3, 10))
    shared = requests("--prefix-len 8")
    assert {r.prompt_len for r in shared} == {20}
    assert len({tuple(r.prompt[:8]) for r in shared}) == 1
    assert len({tuple(r.prompt) for r in shared}) == 20


def test_prefix_repetition_shares_prefixes_evenly() -> None:
    line = "--dataset-name prefix_repetition --num-prompts 12 --prefix-repetition-num-prefixes 5"
    made = requests(line + " --prefix-repetition-prefix-len 9 --prefix-repetition-suffix-len 4")
    assert {(r.prompt_len, r.output_len) for r in made} == {(13, 128)}
    prefixes = Counter(tuple(r.prompt[:9]) for r in made)
    assert sorted(prefixes.values()) == [2, 2, 2, 3, 3]
    assert len({tuple(r.prompt) for r in made}) == 12


@pytest.mark.parametrize(
    ("name", "prompt_mean", "output_mean"),
    [("sharegpt-like", 161.31, 337.99), ("alpaca-like", 19.31, 58.45)],
)
def test_synthetic_lengths_have_the_means_of_the_paper(
    name: str, prompt_mean: float, output_mean: float
) -> None:
    made = requests(f"--dataset-name {name} --num-prompts 8000")
    assert sum(r.prompt_len for r in made) / 8000 == pytest.approx(prompt_mean, rel=0.05)
    assert sum(r.output_len for r in made) / 8000 == pytest.approx(output_mean, rel=0.05)


def turns(*texts: str) -> dict[str, Any]:
    """Return a conversation that a user begins."""
    names = ("human", "gpt") * len(texts)
    pairs = zip(names, texts, strict=False)
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def sharegpt(tmp_path: Path, content: Any, line: str = "") -> list[BenchRequest]:
    path = tmp_path / "share.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return requests(f"--dataset-name sharegpt --dataset-path {path} {line}")


def test_sharegpt_uses_first_questions_and_filters_lengths(tmp_path: Path) -> None:
    system = {"conversations": [{"from": "system", "value": "be kind"}]}
    system["conversations"] += turns("what now", "nothing")["conversations"]
    content = [
        turns("question one", "answer", "second question", "second answer"),
        system,
        turns("abc", "the question is too short"),
        turns("question", "abc"),
        turns("q" * 1025, "too long"),
        turns("q" * 1000, "a" * 1049),
        turns("q" * 1000, "a" * 1048),
        turns("nobody answers"),
        {"id": "no conversation"},
        {"conversations": []},
    ]
    made = sharegpt(tmp_path, content, "--num-prompts 3")
    expected = {("question one", 12, 6), ("what now", 8, 7), ("q" * 1000, 1000, 1048)}
    assert {(r.prompt, r.prompt_len, r.output_len) for r in made} == expected


def test_sharegpt_repeats_requests_with_the_given_output_length(tmp_path: Path) -> None:
    content = [turns("question", "a")]
    made = sharegpt(tmp_path, content, "--num-prompts 5 --sharegpt-output-len 30")
    assert made == [BenchRequest("question", 8, 30)] * 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[{", "share.json is not valid JSON"),
        ({"a": 1}, "not a list of conversations"),
        ([{"text": "x"}, 7], 'no entry with "conversations"'),
        ([turns("abc", "answer")], "no conversation of a question and an answer with 4 to"),
        ([{"conversations": [{"from": "human", "value": 7}, {"from": "gpt"}, "x"]}], "no conversa"),
    ],
)
def test_invalid_sharegpt_files_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sharegpt(tmp_path, content)


def test_missing_file_is_reported() -> None:
    with pytest.raises(ConfigError, match="nowhere.json cannot be read"):
        requests("--dataset-name sharegpt --dataset-path nowhere.json")
    with pytest.raises(ConfigError, match="needs --dataset-path"):
        requests("--dataset-name custom")


def test_custom_lines_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "three"}\n', encoding="utf-8")
    line = f"--dataset-name custom --dataset-path {path}"
    made = requests(line + " --num-prompts 4 --custom-output-len 5")
    assert len(made) == 4
    assert set(made) == {BenchRequest("one", 3, 5), BenchRequest("three", 5, 5)}
    path.write_text('{"prompt": "one"}\n{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2, is not"):
        requests(line)
    path.write_text('{"prompt": "one"}\nnonsense\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2, is not valid JSON"):
        requests(line)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is empty"):
        requests(line)

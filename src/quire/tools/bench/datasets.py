"""The requests of a benchmark: prompts and output lengths, drawn from one seed.

Input: the options of `arguments.py` and a tokenizer. Output: `BenchRequest`s. Random prompts are
token ids; prompts from files are texts.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.base.errors import ConfigError
from quire.tools.workloads import ALPACA, SHAREGPT, Workload

# Common limits for ShareGPT: they exclude turns that are too short to be meaningful, or too long.
MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True)
class BenchRequest:
    """A prompt (text or token ids), its length in tokens, and the number of output tokens."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


class Tokens(Protocol):
    """The tokenizer of the model under test."""

    @property
    def vocab_size(self) -> int:
        """The bound below which token ids may occur in a prompt."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


def make_requests(options: argparse.Namespace, tokens: Tokens, seed: int) -> list[BenchRequest]:
    """Return the requests that the options describe. Raises ConfigError."""
    num, rng = options.num_prompts, np.random.default_rng(seed)
    output_len: int | None = options.random_output_len
    match options.dataset_name:
        case "sharegpt":
            return sharegpt_requests(
                _path(options), num, tokens, rng, options.sharegpt_output_len or output_len
            )
        case "custom":
            length = output_len or options.custom_output_len
            return custom_requests(_path(options), num, tokens, rng, length)
        case "sharegpt-like":
            return like_requests(SHAREGPT, num, tokens.vocab_size, seed)
        case "alpaca-like":
            return like_requests(ALPACA, num, tokens.vocab_size, seed)
        case "prefix_repetition":
            return prefix_requests(
                num,
                options.prefix_repetition_num_prefixes,
                options.prefix_repetition_prefix_len,
                options.prefix_repetition_suffix_len,
                output_len or options.prefix_repetition_output_len,
                tokens.vocab_size,
                rng,
            )
    lengths = (options.random_input_len, output_len or options.default_output_len)
    return random_requests(
        num, lengths, options.random_range_ratio, options.random_prefix_len, tokens.vocab_size, rng
    )


def random_requests(
    num: int,
    lengths: tuple[int, int],
    range_ratio: float,
    prefix_len: int,
    vocab_size: int,
    rng: np.random.Generator,
) -> list[BenchRequest]:
    """Return prompts of a shared prefix and own tokens.

    lengths: own prompt tokens, and output tokens; each is uniform within `range_ratio`."""
    prefix = _ids(rng, prefix_len, vocab_size)
    drawn = []
    for length in lengths:
        low, high = int(length * (1 - range_ratio)), -int(-length * (1 + range_ratio) // 1)
        drawn.append(rng.integers(max(1, low), high + 1, num).tolist())
    return [
        BenchRequest(prefix + _ids(rng, own, vocab_size), prefix_len + own, output_len)
        for own, output_len in zip(*drawn, strict=True)
    ]


def prefix_requests(
    num: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    vocab_size: int,
    rng: np.random.Generator,
) -> list[BenchRequest]:
    """Return prompts with shared prefixes, the same number for each prefix, in random order."""
    prefixes = [_ids(rng, prefix_len, vocab_size) for _ in range(num_prefixes)]
    prompts = [prefixes[i % num_prefixes] + _ids(rng, suffix_len, vocab_size) for i in range(num)]
    return [
        BenchRequest(prompts[i], prefix_len + suffix_len, output_len) for i in rng.permutation(num)
    ]


def like_requests(workload: Workload, num: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Return prompts of random tokens with the lengths of a data set."""
    rng = np.random.default_rng([seed, 1])  # independent of the lengths' random numbers
    inputs, outputs = workload.sample(num, seed)
    return [
        BenchRequest(_ids(rng, prompt_len, vocab_size), prompt_len, output_len)
        for prompt_len, output_len in zip(inputs.tolist(), outputs.tolist(), strict=True)
    ]


def sharegpt_requests(
    path: Path, num: int, tokens: Tokens, rng: np.random.Generator, output_len: int | None
) -> list[BenchRequest]:
    """Return each conversation's first question, with its answer's length as output length."""
    pairs = list(_first_turns(_read_json(path), path))
    found: list[BenchRequest] = []
    for i in rng.permutation(len(pairs)):
        if len(found) == num:
            break
        question, answer = pairs[i]
        prompt_len = len(tokens.encode(question))
        length = output_len or len(tokens.encode(answer))
        short = prompt_len < MIN_TOKENS or (output_len is None and length < MIN_TOKENS)
        long = prompt_len > MAX_PROMPT_TOKENS or prompt_len + length > MAX_TOTAL_TOKENS
        if not short and not long:
            found.append(BenchRequest(question, prompt_len, length))
    if not found:
        raise ConfigError(
            f"{path} has no conversation of a question and an answer with {MIN_TOKENS} to"
            f" {MAX_PROMPT_TOKENS} prompt tokens and at most {MAX_TOTAL_TOKENS} in all."
        )
    return _oversample(found, num, rng)


def custom_requests(
    path: Path, num: int, tokens: Tokens, rng: np.random.Generator, output_len: int
) -> list[BenchRequest]:
    """Return one prompt per line of a file, in random order."""
    prompts = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            item = _parse(line, f"{path}, line {number},")
            prompt = item.get("prompt") if isinstance(item, dict) else None
            if not isinstance(prompt, str) or not prompt:
                raise ConfigError(f'{path}, line {number}, is not {{"prompt": TEXT}}: {line[:80]}')
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f'{path} is empty; write one {{"prompt": TEXT}} per line.')
    chosen = [prompts[i] for i in rng.permutation(len(prompts))[:num]]
    found = [BenchRequest(text, len(tokens.encode(text)), output_len) for text in chosen]
    return _oversample(found, num, rng)


def _first_turns(conversations: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Yield each conversation's first answered question of a user, with its answer."""
    if not isinstance(conversations, list):
        raise ConfigError(f"{path} is not a list of conversations in the ShareGPT format.")
    num_read = 0
    for entry in conversations:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            continue
        num_read += 1
        pairs = [(turn.get("from"), turn.get("value")) for turn in turns if isinstance(turn, dict)]
        for (speaker, question), (other, answer) in zip(pairs, pairs[1:], strict=False):
            if speaker in ("human", "user") and other not in ("human", "user"):
                if isinstance(question, str) and isinstance(answer, str):
                    yield question, answer
                break
    if not num_read:
        raise ConfigError(
            f'{path} has no entry with "conversations", a list of {{"from", "value"}}, as a'
            " ShareGPT file does."
        )


def _oversample(
    found: list[BenchRequest], num: int, rng: np.random.Generator
) -> list[BenchRequest]:
    """Repeat random requests until there are `num`."""
    missing = num - len(found)
    return found + [found[i] for i in rng.integers(0, len(found), max(0, missing))]


def _ids(rng: np.random.Generator, num: int, vocab_size: int) -> list[int]:
    ids: list[int] = rng.integers(0, vocab_size, num).tolist()
    return ids


def _path(options: argparse.Namespace) -> Path:
    if options.dataset_path is None:
        raise ConfigError(f"the dataset {options.dataset_name} needs --dataset-path FILE.")
    path: Path = options.dataset_path
    return path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the dataset {path} cannot be read ({error}).") from error


def _read_json(path: Path) -> Any:
    return _parse(_read(path), f"{path}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON ({error}).") from error

"""Answers of TRL's server, made from answers of completions and chats.

Shape legend: B sequences, T scored tokens of the longest sequence, K log-probabilities per token.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Json = dict[str, Any]

ID = "token_id:"  # names of tokens in log-probabilities, before the id
Entries = list[tuple[int, float]]  # token ids and log-probabilities, the most probable first


def rollouts_json(prompt_ids: list[list[int]], choices: Sequence[Json]) -> Json:
    """Return the answer to /generate/ and /chat/. choices: of all prompts, in their order."""
    found: Json = {
        "prompt_ids": prompt_ids,
        "completion_ids": [list(each.get("token_ids") or ()) for each in choices],
        "logprobs": None,
        "logprob_token_ids": None,
    }
    if any(each["logprobs"] is not None for each in choices):
        entries = [list(_positions(each["logprobs"])) for each in choices]
        found["logprobs"] = [[[value for _, value in each] for each in row] for row in entries]
        found["logprob_token_ids"] = [[[key for key, _ in each] for each in row] for row in entries]
    return found


def _positions(logprobs: Json | None) -> Iterator[Entries]:
    """Yield the log-probabilities of the chosen token and the most probable tokens, at each place.
    logprobs: of a completion's choice, or of a chat's."""
    if logprobs is None:
        return
    if "content" in logprobs:
        for entry in logprobs["content"]:
            tops = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
            yield _sorted({entry["token"]: entry["logprob"]} | tops)
        return
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, value, tops in zip(*columns, strict=True):
        yield _sorted({token: value} | (tops or {}))


def _sorted(values: dict[str, float]) -> Entries:
    entries = ((int(name.removeprefix(ID)), value) for name, value in values.items())
    return sorted(entries, key=lambda entry: -entry[1])


def scores_json(choices: Sequence[Json], prompt_lengths: Sequence[int]) -> Json:
    """Return the answer to /get_sequence_logprobs/ as lists, the most probable tokens first."""
    entries = [
        [_ranked(position) for position in choice["prompt_logprobs"][length:]]
        for choice, length in zip(choices, prompt_lengths, strict=True)
    ]
    return {
        "logprobs": [[[value for _, value in each] for each in row] for row in entries],
        "logprob_token_ids": [[[key for key, _ in each] for each in row] for row in entries],
    }


def scores_binary(
    choices: Sequence[Json], sequences: Sequence[Sequence[int]], lengths: Sequence[int], num: int
) -> Json:
    """Return the same as float32 and int32 arrays in base64, padded with minus infinity and 0, with
    the log-probability of each sequence's own token. num: K."""
    counts = [len(tokens) - length for tokens, length in zip(sequences, lengths, strict=True)]
    shape = len(choices), max(counts), num
    logprobs_BTK, ids_BTK = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    own_BT1 = np.full((*shape[:2], 1), -np.inf, np.float32)
    own_ids_BT1 = np.zeros(own_BT1.shape, np.int32)
    for row, (choice, length) in enumerate(zip(choices, lengths, strict=True)):
        for place, position in enumerate(choice["prompt_logprobs"][length:]):
            own = sequences[row][length + place]
            own_ids_BT1[row, place] = own
            if position is None:
                continue
            own_BT1[row, place] = position[str(own)]["logprob"]
            for column, (token_id, value) in enumerate(_ranked(position)[:num]):
                logprobs_BTK[row, place, column], ids_BTK[row, place, column] = value, token_id
    return {
        "logprobs_b64": _base64(logprobs_BTK),
        "token_ids_b64": _base64(ids_BTK),
        "actual_logprobs_b64": _base64(own_BT1),
        "actual_token_ids_b64": _base64(own_ids_BT1),
        "shape": list(shape),
        "completion_lengths": counts,
    }


def _ranked(position: Json | None) -> Entries:
    """Return the entries of a prompt's position by rank; none for the first token."""
    entries = sorted((position or {}).items(), key=lambda item: item[1]["rank"])
    return [(int(token_id), entry["logprob"]) for token_id, entry in entries]


def _base64(array: "np.ndarray[Any, Any]") -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")

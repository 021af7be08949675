"""Batch-level logits processors, run for single rows."""

from typing import Any

import pytest
import torch

from quire.base.errors import ConfigError
from quire.vllm import logits_processors
from quire.vllm.configs import VllmConfig
from quire.vllm.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    load_processors,
    process_dict_updates,
    processors_for,
)
from quire.vllm.params import SamplingParams

CONFIG: Any = None  # which these classes do not read
V = 8
PARAMS = SamplingParams(extra_args={"target": 2})


class Counting(LogitsProcessor):
    """Adds the number of its calls to the logit of the target, and records what it sees."""

    made: list["Counting"] = []

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.target: int | None = None
        self.output: list[int] = []
        self.seen: list[list[int]] = []
        Counting.made.append(self)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("target") == "bad":
            raise ValueError("the target must be a number")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            [(_, params, _, self.output)] = batch_update.added
            self.target = (params.extra_args or {}).get("target")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(list(self.output))
        if self.target is not None:
            logits[:, self.target] += len(self.seen)
        return logits


@pytest.fixture(autouse=True)
def none_made() -> None:
    Counting.made.clear()


def test_one_instance_follows_one_sequence() -> None:
    [process] = processors_for([Counting], CONFIG, PARAMS)
    for output in ([], [4], [4, 5]):
        found = process([1, 2], output, torch.zeros(V))
        assert found.shape == (V,) and found[2] == len(output) + 1
    [only] = Counting.made
    assert only.seen == [[], [4], [4, 5]]


def test_sequences_of_a_request_have_instances_of_their_own() -> None:
    [process] = processors_for([Counting], CONFIG, PARAMS)
    for outputs in (([], []), ([4], [5]), ([4, 6], [5, 6])):
        for output in outputs:
            process([1], output, torch.zeros(V))
    assert sorted(each.seen for each in Counting.made) == [
        [[], [4], [4, 6]],
        [[], [5], [5, 6]],
    ]
    process([1], [4, 6, 7, 8], torch.zeros(V))  # a gap, as after preemption
    assert Counting.made[-1].seen == [[4, 6, 7, 8]]


def test_prompts_that_share_parameters_have_instances_of_their_own() -> None:
    """The first prompt ends after one call; the second one must not take over its instance."""
    [process] = processors_for([Counting], CONFIG, PARAMS)
    for prompt in ([1], [2]):
        process(prompt, [], torch.zeros(V))
    process([2], [4], torch.zeros(V))
    assert [each.seen for each in Counting.made] == [[[]], [[], [4]]]


def test_a_long_sequence_outlives_many_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_processors, "MAX_ROWS", 2)
    [process] = processors_for([Counting], CONFIG, PARAMS)
    for num_tokens in range(5):
        process([1], [4] * num_tokens, torch.zeros(V))
        process([2 + num_tokens], [], torch.zeros(V))
    assert [len(each.seen) for each in Counting.made] == [5, 1, 1, 1, 1, 1]


def test_parameters_are_checked_by_the_class() -> None:
    with pytest.raises(ValueError, match="must be a number"):
        processors_for([Counting], CONFIG, SamplingParams(extra_args={"target": "bad"}))


def test_greedy_rows_skip_what_keeps_the_best_token() -> None:
    class Invariant(Counting):
        def is_argmax_invariant(self) -> bool:
            return True

    [process] = processors_for([Invariant], CONFIG, SamplingParams(temperature=0))
    process([1], [], torch.zeros(V))
    assert not Counting.made[0].seen


@pytest.mark.parametrize("has_prompt", [False, True])
def test_functions_of_requests(has_prompt: bool) -> None:
    class Adapter(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            if params.extra_args is None:
                return None
            if has_prompt:
                return lambda prompt, output, logits: logits + len(prompt) + len(output)
            return lambda output, logits: logits + len(output)

    [process] = processors_for([Adapter], CONFIG, PARAMS)
    assert process([1, 1], [], torch.zeros(V))[0] == 2 * has_prompt
    assert process([1, 1], [3], torch.zeros(V))[0] == 1 + 2 * has_prompt
    assert not processors_for([Adapter], CONFIG, SamplingParams())


def test_a_dictionary_follows_a_batch() -> None:
    def update(*, removed: Any = (), added: Any = (), moved: Any = ()) -> bool:
        return process_dict_updates(
            states, BatchUpdate(4, removed, added, moved), lambda params, prompt, output: params
        )

    states: dict[int, Any] = {}
    assert update(added=[(0, "a", [], []), (1, "b", [], []), (2, None, [], [])])
    assert states == {0: "a", 1: "b"}
    assert not process_dict_updates(states, None, lambda *_: None)
    assert update(moved=[(0, 1, MoveDirectionality.SWAP)]) and states == {1: "a", 0: "b"}
    assert update(moved=[(0, 3, MoveDirectionality.UNIDIRECTIONAL)]) and states == {1: "a", 3: "b"}
    assert update(moved=[(2, 3, MoveDirectionality.UNIDIRECTIONAL)]) and states == {1: "a"}
    assert update(removed=[1], added=[(1, "c", [], [])]) and states == {1: "c"}
    assert not update(removed=[0])


def test_classes_by_name() -> None:
    assert load_processors([Counting, f"{__name__}:Counting"])[0] is Counting
    for given in ("no.such.module:Class", f"{__name__}:Missing", int, f"{__name__}:V"):
        with pytest.raises(ConfigError, match="logits_processors"):
            load_processors([given])

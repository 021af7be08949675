"""The sampler: the effect of each parameter on a row, alone and together with other rows.

Covers `runner/sampling/edits.py`.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from quire.base.masks import TokenMasks
from quire.base.plan import Candidates, Plan, RowFork, RowStart, StepResult
from quire.base.requests.sampling_params import SamplingParams
from quire.ops.collective import ALONE, RankGroup
from quire.ops.host import native
from quire.ops.rows.step_inputs import SampleInputs
from quire.ops.sampling.logprobs import token_logprobs
from quire.runner.attachment import SamplingFeature, SamplingPart
from quire.runner.rows import DeviceRows
from quire.runner.sampling.candidates import logprob_tensors, to_candidates
from quire.runner.sampling.vocabulary import vocabulary_of
from quire.runner.setup.assemble import empty_rows, make_device, make_ops, make_sampler
from quire.runner.step_ops import StepShape
from quire.runner.steps import reasons_of, unservable
from tests.ops.test_mask import words_of
from tests.support.kernels import sampling_oracle as oracle

VOCAB = 97
MAX_ROWS = 8
MAX_LEN = 40


class Bench:
    """A sampler over rows whose tokens are random after their first ones."""

    def __init__(
        self, vocab_size: int = VOCAB, device: str = "cpu", group: RankGroup = ALONE
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.device = make_device(torch.device(device))
        state = empty_rows(self.device.device, MAX_ROWS, MAX_LEN, 1, MAX_LEN)
        state.tokens_RM[:] = torch.randint(0, vocab_size, (MAX_ROWS, MAX_LEN), generator=generator)
        ops = make_ops(self.device, state, vocab_size)
        self.rows = DeviceRows(self.device, state, ops)
        vocabulary = vocabulary_of(vocab_size, group)
        self.sampler = make_sampler((), self.device, state, ops, vocabulary)
        self.lengths = np.zeros(MAX_ROWS, np.int64)

    def start(
        self,
        row: int,
        prompt: list[int] | None = None,
        output: list[int] | None = None,
        seed: int = 1,
        stop_token_ids: tuple[int, ...] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
        sample_index: int = 0,
        is_beam: bool = False,
        **params,
    ) -> None:
        prompt = [1, 2, 3] if prompt is None else prompt
        tokens = np.array(prompt + (output or []), np.int32)
        self.lengths[row] = len(tokens)
        start = RowStart(
            row,
            tokens,
            len(tokens) - 1,
            len(prompt),
            SamplingParams(max_tokens=None, **params),
            seed,
            sample_index,
            stop_token_ids,
            bad_words,
        )
        start.params.use_beam_search = is_beam
        self.sampler.start_row(start)
        self.apply(Plan(0, started=(start,)))

    def fork(self, parent: int, child: int, sample_index: int) -> None:
        self.sampler.copy_row(parent, child)
        self.lengths[child] = self.lengths[parent]
        self.apply(Plan(0, forked=(RowFork(parent, child, sample_index),)))

    def apply(self, plan: Plan) -> int:
        requested = self.sampler.requested(plan.sample_rows)
        update, lists = self.rows.apply(plan, self.sampler.flags.has_edits, requested)
        self.rows.run_with(update, list)
        return lists.result_slot

    def sample(
        self,
        logits_NV: torch.Tensor,
        *rows: int,
        moved: int = 0,
        masks: TokenMasks | None = None,
    ) -> "Sampled":
        """Sample these rows in one step, as if each had `moved` more tokens."""
        which, ones = np.array(rows, np.int32), np.ones(len(rows), np.int32)
        sampler = self.sampler
        self.rows.state.computed_R[list(rows)] = torch.from_numpy(self.lengths[which] - 1).to(
            self.device.device
        )
        plan = Plan(0, which, ones, (self.lengths[which] - 1).astype(np.int32), sample_rows=which)
        slot = self.apply(plan)
        requested = sampler.requested(which, None if masks is None else masks.rows)
        needs = sampler.needs(requested)
        parts = sampler.parts(needs, requested)
        if masks is not None:
            places, words = requested.masked, masks.of(which[requested.masked])[:, 0]
            self.rows.ops.prepare_masks(places.astype(np.int32), words).take()

        def work() -> list[torch.Tensor]:
            logits = sampler.vocabulary.needed(logits_NV, needs)
            shape = StepShape(ones, self.lengths[which].astype(np.int32), len(rows))
            gathered = self.rows.ops.gather(shape)
            old = gathered.samples
            samples = SampleInputs(old.rows, old.last, old.lengths + moved, old.prompt_lens)
            ids_N, is_valid_N = sampler.sample(logits, samples, needs, parts)
            self.rows.ops.advance(gathered, ids_N, is_valid_N)
            found = [tensor for part in parts for tensor in part.found()]
            return [self.rows.ops.results_QR[slot, : len(rows)], *found]

        errors = {} if masks is None else masks.errors
        tokens_N, *arrived = self.device.run(work).wait()
        chosen = tokens_N.numpy()
        reasons = reasons_of(which, chosen, requested, errors)
        result = StepResult(
            0,
            np.maximum(chosen, 0)[:, None],
            ones,
            row_errors=reasons,
            unservable_rows=unservable(reasons),
        )
        for part in parts:
            result = part.read(result, arrived, is_recorded=False)
        tokens = torch.from_numpy(result.token_ids[:, 0].astype(np.int64))
        return Sampled(tokens, result.candidates, result.row_errors, result.unservable_rows)


@dataclass
class Sampled:
    token_ids_N: torch.Tensor
    candidates: dict[int, Candidates]
    row_errors: dict[int, str]
    unservable_rows: tuple[int, ...] = ()


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


GREEDY = {"temperature": 0.0}

ROWS = {
    0: {"temperature": 0.0},
    1: {"temperature": 0.7},
    2: {"top_k": 5},
    3: {"top_p": 0.8, "logprobs": 3},
    4: {"min_p": 0.1, "repetition_penalty": 1.5, "output": [4, 5, 4]},
    5: {"temperature": 0.0, "logit_bias": {7: 100.0}, "logprobs": 0},
    6: {"allowed_token_ids": [3, 50, 60], "top_k": 2, "top_p": 0.9},
    7: {"presence_penalty": 1.0, "frequency_penalty": 1.0, "output": [8, 9], "logprobs": -1},
}


def test_row_gives_equal_tokens_alone_and_in_any_batch():
    bench = Bench()
    for row, settings in ROWS.items():
        bench.start(row, seed=row, **settings)
    logits = random_logits(MAX_ROWS)
    together = bench.sample(logits, *range(MAX_ROWS)).token_ids_N.tolist()
    backwards = bench.sample(logits.flip(0), *reversed(range(MAX_ROWS))).token_ids_N.tolist()
    assert backwards[::-1] == together
    for row in range(MAX_ROWS):
        assert bench.sample(logits[row : row + 1], row).token_ids_N.tolist() == [together[row]]


def test_logits_are_not_changed():
    bench = Bench()
    for row, settings in ROWS.items():
        bench.start(row, **settings)
    logits = random_logits(MAX_ROWS)
    before = logits.clone()
    bench.sample(logits, *range(MAX_ROWS))
    assert torch.equal(logits, before)


def test_greedy_ties_take_the_lowest_id():
    bench = Bench()
    bench.start(2, **GREEDY)
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, [40, 41]] = 3
    assert bench.sample(logits, 2).token_ids_N.tolist() == [40]


def test_seed_determines_the_tokens():
    bench = Bench()
    logits = random_logits(1).expand(4, VOCAB)
    for row, seed in enumerate((5, 5, 6, -(2**63))):
        bench.start(row, seed=seed, temperature=2.0)

    def texts() -> list[list[int]]:
        steps = [bench.sample(logits, 0, 1, 2, 3, moved=moved).token_ids_N for moved in range(30)]
        return torch.stack(steps, dim=1).tolist()

    first = texts()
    assert first == texts()
    assert first[0] == first[1]
    assert len({tuple(text) for text in first}) == 3


def test_seeds_above_63_bits_are_accepted():
    bench = Bench()
    bench.start(0, seed=2**64 - 1, temperature=2.0)
    bench.start(1, seed=-1, temperature=2.0)
    tokens = bench.sample(random_logits(1).expand(2, VOCAB), 0, 1).token_ids_N.tolist()
    assert tokens[0] == tokens[1]


def test_samples_follow_the_filtered_distribution():
    settings = {"temperature": 1.3, "top_k": 30, "top_p": 0.9}
    bench = Bench()
    bench.start(0, **settings)
    logits = random_logits(1)
    tokens = [bench.sample(logits, 0, moved=moved).token_ids_N for moved in range(1500)]
    counts = np.bincount(torch.cat(tokens).numpy(), minlength=VOCAB)
    expected = oracle.filtered_distribution(logits[0].double().numpy(), **settings)
    assert abs(oracle.chi_square_z(counts, expected)) < 4.5


def test_penalties_change_the_greedy_choice():
    prompt, output = [10, 11, 12], [20, 20, 21]
    penalties = {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.4,
    }
    bench = Bench()
    bench.start(0, prompt, output, **GREEDY, **penalties)
    bench.start(1, prompt, output, **GREEDY)
    for seed in range(30):
        logits = random_logits(2, seed=seed)
        logits[:, [10, 20, 21]] += 4
        changed = oracle.penalised(logits[0].double().numpy(), prompt, output, 0.6, 0.9, 1.4)
        expected = [int(changed.argmax()), int(logits[1].argmax())]
        assert bench.sample(logits, 0, 1).token_ids_N.tolist() == expected


def test_logit_bias():
    bench = Bench()
    logits = random_logits(1)
    order = oracle.falling_order(logits[0].numpy())
    bench.start(0, **GREEDY, logit_bias={order[0]: -100.0, order[1]: -50.0, order[2]: -0.0})
    assert bench.sample(logits, 0).token_ids_N.tolist() == [order[2]]


@pytest.mark.parametrize("settings", [GREEDY, {"temperature": 2.0}, {"top_k": 50, "top_p": 0.99}])
def test_allowed_token_ids(settings):
    bench = Bench()
    bench.start(0, allowed_token_ids=[3, 90], **settings)
    chosen = {int(bench.sample(random_logits(1, seed=seed), 0).token_ids_N) for seed in range(40)}
    assert chosen == {3, 90}


def test_min_tokens_masks_stop_tokens():
    logits = random_logits(1)
    order = oracle.falling_order(logits[0].numpy())
    stop = (order[0], order[1])
    for num_output, expected in ((0, order[2]), (1, order[2]), (2, order[0])):
        bench = Bench()
        bench.start(0, output=[30, 31][:num_output], stop_token_ids=stop, min_tokens=2, **GREEDY)
        assert bench.sample(logits, 0).token_ids_N.tolist() == [expected]


@pytest.mark.parametrize(
    ("prompt", "output", "is_masked"),
    [
        ([1], [5, 6], True),
        ([1], [9, 5, 6], True),
        ([1], [6, 5], False),
        ([1], [6], False),
        ([1, 5], [6], False),  # a bad word begins in the output
        ([1], [], False),
    ],
)
def test_bad_words_of_several_tokens(prompt, output, is_masked):
    bench = Bench()
    logits = random_logits(1)
    logits[0, 7], logits[0, 8] = 50, 40
    words = ((5, 6, 7), (60, 61, 62, 63, 7), (64, 7))
    bench.start(0, prompt, output, bad_words=words, **GREEDY)
    assert bench.sample(logits, 0).token_ids_N.tolist() == [8 if is_masked else 7]


def test_bad_words_of_one_token():
    bench = Bench()
    logits = random_logits(1)
    order = oracle.falling_order(logits[0].numpy())
    bench.start(0, bad_words=((order[0],), (order[1],)), **GREEDY)
    assert bench.sample(logits, 0).token_ids_N.tolist() == [order[2]]


def test_requests_of_a_repeated_step_are_cached():
    """The cache ends when a row starts, ends or forks: its features may then change."""
    bench, rows = Bench(), np.array([0, 1], np.int32)
    sampler = bench.sampler
    bench.start(0, **GREEDY)
    bench.start(1, **GREEDY)
    first = sampler.requested(rows)
    needs = sampler.needs(first)
    assert sampler.requested(rows) is first and sampler.needs(first) is needs
    assert sampler.requested(rows.copy()) is not first, "another step"
    masked = sampler.requested(rows, rows[1:])
    assert masked.masked.tolist() == [1] and sampler.needs(masked).has_masks
    assert not sampler.needs(sampler.requested(rows)).has_masks

    bench.start(1, temperature=0.7, top_k=3)
    assert sampler.requested(rows).flags.is_greedy.tolist() == [True, False]
    assert sampler.needs(sampler.requested(rows)).has_filters
    bench.start(0, bad_words=((5,),), **GREEDY)
    bench.fork(0, 1, 1)
    assert set(sampler.requested(rows).spans) == {0, 1}
    assert sampler.needs(sampler.requested(rows)).edits is not None
    sampler.release_rows(rows)
    assert sampler.needs(sampler.requested(rows)).edits is None


def test_logprobs_are_of_the_raw_logits():
    bench = Bench()
    bench.start(0, temperature=1.7, top_k=4, logit_bias={5: 100.0}, logprobs=4)
    bench.start(1, **GREEDY, logprobs=0)
    bench.start(2, **GREEDY)
    bench.start(3, **GREEDY, logprobs=-1)
    logits = random_logits(4)
    sampled = bench.sample(logits, 3, 2, 0, 1)
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    candidates = sampled.candidates
    assert set(candidates) == {0, 1, 3}
    for n, row, count in ((0, 3, VOCAB), (2, 0, 4), (3, 1, 0)):
        found, order = candidates[row], oracle.falling_order(logits[n].numpy())
        chosen = int(sampled.token_ids_N[n])
        assert found.token_ids.tolist() == [chosen, *order[:count]]
        np.testing.assert_allclose(found.logprobs, expected[n, found.token_ids], atol=2e-6)
        assert found.rank == order.index(chosen) + 1
    assert sampled.token_ids_N[2] == 5


def test_prompt_logprobs_are_ranked_log_softmax():
    logits, targets = random_logits(6), torch.arange(6) * 9
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    for count in (0, 3, VOCAB):
        tensors = logprob_tensors(token_logprobs(logits, targets, count))
        found = to_candidates(tensors, np.full(6, count))
        assert len(found) == 6
        for t, item in enumerate(found):
            order = oracle.falling_order(logits[t].numpy())
            assert item.token_ids.tolist() == [int(targets[t]), *order[:count]]
            np.testing.assert_allclose(item.logprobs, expected[t, item.token_ids], atol=2e-6)
            assert item.rank == order.index(int(targets[t])) + 1


@pytest.mark.parametrize("settings", [GREEDY, {}, {"top_p": 0.5}, {"top_k": 3, "logprobs": 2}])
def test_rows_with_nonfinite_logits_fail_alone(settings):
    bench = Bench()
    for row in range(5):
        bench.start(row, seed=row, **settings)
    logits = random_logits(5)
    good = bench.sample(logits, *range(5)).token_ids_N
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, 3] = -torch.nan
    sampled = bench.sample(logits, *range(5))
    assert set(sampled.row_errors) == {0, 1, 2, 3}
    assert "not finite" in sampled.row_errors[0]
    assert sampled.token_ids_N.tolist() == [0, 0, 0, 0, int(good[4])]
    assert set(sampled.candidates) == ({4} if "logprobs" in settings else set())


def test_allowed_and_bad_words_that_exclude_all_tokens_fail():
    bench = Bench()
    bench.start(0, allowed_token_ids=[4], bad_words=((4,),), **GREEDY)
    bench.start(1, **GREEDY)
    errors = bench.sample(random_logits(2), 0, 1).row_errors
    assert list(errors) == [0] and "allowed_token_ids" in errors[0]


def test_restarted_row_drops_its_old_parameters():
    bench = Bench()
    bench.start(0, logit_bias={5: 100.0}, presence_penalty=2.0, logprobs=3, top_k=1)
    bench.sampler.release_rows(np.array([0], np.int32))
    bench.start(0, **GREEDY)
    logits = random_logits(1)
    sampled = bench.sample(logits, 0)
    assert sampled.token_ids_N.tolist() == [int(logits[0].argmax())]
    assert sampled.candidates == {}


def test_parts_change_the_edited_logits_before_tokens_are_chosen() -> None:
    class Part(SamplingPart):
        def edited(self, logits_NV: torch.Tensor) -> None:
            logits_NV[0, 7] = 9.0

    bench = Bench()
    bench.start(0, logit_bias={7: -3.0}, **GREEDY)
    bench.sampler.parts = lambda needs, requested: [Part()]
    assert bench.sample(torch.zeros(1, VOCAB), 0).token_ids_N.tolist() == [7]


class RowEvents(SamplingFeature):
    """A feature that notes its notifications of rows."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, start: RowStart) -> None:
        self.events.append(f"start {start.row}")

    def copy(self, parent: int, child: int) -> None:
        self.events.append(f"copy {parent} {child}")

    def release(self, row: int) -> None:
        self.events.append(f"release {row}")


def test_features_are_notified_only_of_rows_that_request_them():
    bench, feature = Bench(), RowEvents()
    bench.sampler.features.append(feature)
    bench.start(0, temperature=0.7, top_p=0.9)
    bench.fork(0, 1, sample_index=1)
    bench.sampler.release_rows(np.array([0, 1], np.int32))
    assert feature.events == []
    bench.start(2, logprobs=1, **GREEDY)
    bench.fork(2, 3, sample_index=1)
    bench.start(2, **GREEDY)  # another sequence takes the row
    bench.sampler.release_rows(np.array([2, 3], np.int32))
    assert feature.events == ["start 2", "copy 2 3", "release 2", "release 3"]
    bench.start(0, **GREEDY)
    bench.fork(0, 3, sample_index=1)
    assert len(feature.events) == 4


@pytest.mark.parametrize(
    "params",
    [
        {"prompt_logprobs": 0}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]},
        {"min_tokens": 1, "stop_token_ids": (2,)}, {"bad_words": ((1,),)},
        {"xtc_probability": 0.5}, {"dry_multiplier": 1.0},
        {"logprobs": 0, "logprob_token_ids": [1]},
    ],
)  # fmt: skip
def test_each_feature_parameter_notifies_the_feature(params):
    bench, feature = Bench(), RowEvents()
    bench.sampler.features.append(feature)
    bench.start(1, **params)
    assert feature.events == ["start 1"]


def test_copied_row_samples_as_its_parent_with_its_own_noise():
    bench = Bench()
    bench.start(0, allowed_token_ids=[1, 2, 3, 4, 5, 6, 7, 8], temperature=2.0, logprobs=1)
    bench.fork(0, 1, sample_index=0)
    bench.fork(0, 2, sample_index=1)
    logits = random_logits(1).expand(3, VOCAB)
    steps = [bench.sample(logits, 0, 1, 2, moved=moved) for moved in range(20)]
    texts = torch.stack([step.token_ids_N for step in steps], dim=1).tolist()
    assert texts[0] == texts[1] != texts[2]
    assert set(texts[2]) <= set(range(1, 9))
    assert set(steps[0].candidates) == {0, 1, 2}


def masks_of(allowed: dict[int, set[int]], errors: dict[int, str] | None = None) -> TokenMasks:
    """Return masks of rows, in falling order of the rows."""
    rows = sorted(allowed, reverse=True)
    words = words_of([allowed[row] for row in rows], 4).numpy()[:, None]
    return TokenMasks(np.array(rows, np.int32), words, errors or {})


@pytest.fixture(params=["core", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Mask and choose tokens by the C++ core, or by torch."""
    if request.param == "torch":
        monkeypatch.setattr(native, "core_for", lambda *tensors: None)
    return request.param


def test_masks_restrict_their_rows_and_no_others(path: str) -> None:
    bench = Bench()
    for row, settings in ROWS.items():
        bench.start(row, seed=row, **settings)
    logits = random_logits(MAX_ROWS)
    alone = [bench.sample(logits[row : row + 1].clone(), row) for row in range(MAX_ROWS)]
    allowed = {0: {5, 6}, 1: {*range(40, 60)}, 3: {90, 91, 96}, 4: {4, 5, 7}, 7: {*range(VOCAB)}}
    together = bench.sample(logits.clone(), *range(MAX_ROWS), masks=masks_of(allowed))
    found = together.token_ids_N.tolist()
    assert not together.row_errors
    assert all(found[row] in tokens for row, tokens in allowed.items())
    for row, each in enumerate(alone):
        if row not in allowed or row == 7:
            assert found[row] == int(each.token_ids_N)
        if row in each.candidates:  # of the raw logits, regardless of the mask
            raw, mine = each.candidates[row], together.candidates[row]
            assert raw.token_ids[1:].tolist() == mine.token_ids[1:].tolist()
            assert raw.logprobs[1:].tobytes() == mine.logprobs[1:].tobytes()
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert together.candidates[3].logprobs[0] == pytest.approx(float(expected[3, found[3]]))
    greedy = max(allowed[0], key=lambda token: float(logits[0, token]))
    assert found[0] == greedy


def test_filters_apply_to_allowed_tokens(path: str) -> None:
    bench = Bench()
    bench.start(0, temperature=2.0, top_k=2)
    bench.start(1, temperature=2.0, top_k=2, allowed_token_ids=[3, 8, 20, 21, 22])
    logits = random_logits(2)
    allowed = {0: {3, 4, 50, 70, 80}, 1: {8, 20, 22, 60}}
    masks = masks_of(allowed)
    steps = [bench.sample(logits.clone(), 0, 1, moved=m, masks=masks) for m in range(40)]
    chosen = torch.stack([step.token_ids_N for step in steps]).T.tolist()
    best = sorted(allowed[0], key=lambda token: -float(logits[0, token]))
    assert set(chosen[0]) == set(best[:2])
    assert set(chosen[1]) < {8, 20, 22} and len(set(chosen[1])) == 2


def test_mask_without_tokens_fails_its_request(path: str) -> None:
    bench = Bench()
    bench.start(0, **GREEDY, logprobs=2)
    bench.start(1, **GREEDY)
    bench.start(2, **GREEDY, allowed_token_ids=[4])
    bench.start(3, **GREEDY)
    masks = masks_of({0: set(), 1: set(), 2: {5}}, {1: "the grammar is stuck"})
    sampled = bench.sample(random_logits(4), 0, 1, 2, 3, masks=masks)
    assert sampled.row_errors.keys() == {0, 1, 2} and sampled.unservable_rows == (0, 1, 2)
    assert sampled.row_errors[1] == "the grammar is stuck"
    assert all("grammar" in sampled.row_errors[row] for row in (0, 2))
    assert sampled.candidates == {}


def test_masked_beams_have_allowed_candidates_with_raw_logprobs(path: str) -> None:
    bench = Bench()
    bench.start(0, **GREEDY, logprobs=4, is_beam=True)
    bench.start(1, **GREEDY, logprobs=4)
    bench.start(2, **GREEDY, logprobs=3, is_beam=True)
    logits = random_logits(3)
    allowed = {0: {10, 20, 30, 40, 50, 60}, 1: {10, 20}, 2: {7, 9}}
    found = bench.sample(logits.clone(), 0, 1, 2, masks=masks_of(allowed)).candidates
    raw = torch.log_softmax(logits.double(), dim=-1).numpy()
    order = sorted(allowed[0], key=lambda token: -raw[0, token])
    assert found[0].token_ids.tolist() == [order[0], *order[:4]]
    np.testing.assert_allclose(found[0].logprobs, raw[0, found[0].token_ids], atol=2e-6)
    assert found[1].token_ids[1:].tolist() == oracle.falling_order(logits[1].numpy())[:4]
    order = sorted(allowed[2], key=lambda token: -raw[2, token])
    assert found[2].token_ids[1:3].tolist() == order
    np.testing.assert_allclose(found[2].logprobs[1:3], raw[2, order], atol=2e-6)
    assert found[2].logprobs[3:].tolist() == [-np.inf]


def test_masks_change_logits_in_place_unless_raw_ones_are_requested() -> None:
    bench = Bench()
    bench.start(0, **GREEDY)
    logits = random_logits(1)
    bench.sample(logits, 0, masks=masks_of({0: {3}}))
    assert logits.isfinite().sum() == 1, "they were masked in place"


@pytest.mark.gpu
def test_cuda_chooses_the_tokens_of_the_cpu():
    logits = random_logits(MAX_ROWS, 5000)
    chosen = []
    for device in ("cpu", "cuda"):
        bench = Bench(5000, device)
        for row, settings in ROWS.items():
            bench.start(row, seed=row, **settings)
        chosen.append(bench.sample(logits.to(device), *range(MAX_ROWS)).token_ids_N.tolist())
    assert chosen[0] == chosen[1]


def test_row_with_all_logprobs_widens_the_whole_step() -> None:
    bench = Bench()
    for row, logprobs in enumerate((None, 3, -1)):
        bench.start(row, temperature=0.0, logprobs=logprobs)
    found = [
        bench.sampler.needs(bench.sampler.requested(np.array(rows, np.int32))).num_candidates
        for rows in ([0], [0, 1], [0, 2], [0, 1, 2])
    ]
    assert found[0] < 0 and 3 <= found[1] < VOCAB and found[2:] == [VOCAB, VOCAB]

"""Sampling, stopping and log-probabilities through the whole engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import RequestError
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.cases import in_turn, slow_but
from tests.support.models.reference_checkpoints import (
    checkpoint,
    pool_bytes,
    reference_logits,
    reference_tokens,
    text_checkpoint,
    write_checkpoint,
)
from tests.support.render.tiny_tokenizers import tokenizer, write_directory

TOK: Tokenizer = tokenizer("byte_level")
VOCAB = 97
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'


def open_llm(folder: Path | None = None, **settings: Any) -> LLM:
    defaults = {
        "dtype": "float64",
        "max_model_len": 96,
        "block_size": 4,
        "attention_backend": "torch",
        "disable_log_stats": True,
    }
    return LLM(str(folder or checkpoint("llama")), **(defaults | settings))


@pytest.fixture(scope="module")
def ids_llm() -> Iterator[LLM]:
    """A model without a tokenizer: prompts and answers are token ids."""
    with open_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def text_llm() -> Iterator[LLM]:
    with open_llm(text_checkpoint()) as llm:
        yield llm


def line(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return output


def greedy(llm: LLM, prompt: Any, **params: Any) -> list[int]:
    return run(llm, prompt, temperature=0, **params).outputs[0].token_ids


# ---- seeds -----------------------------------------------------------------------------------

# One kind of options each: plain, filtered, penalised, masked.
SEEDED = [
    SamplingParams(seed=1, max_tokens=14),
    SamplingParams(seed=2, max_tokens=9, temperature=0.7, top_p=0.8),
    SamplingParams(seed=3, max_tokens=16, top_k=5),
    SamplingParams(seed=4, max_tokens=12, min_p=0.05, presence_penalty=1.0),
    SamplingParams(seed=5, max_tokens=14, repetition_penalty=1.3, logit_bias={7: 3.0}),
    SamplingParams(seed=6, max_tokens=11, allowed_token_ids=list(range(20, 60))),
    SamplingParams(seed=-5, max_tokens=13, frequency_penalty=0.5, temperature=1.4),
    SamplingParams(seed=2**63 - 1, max_tokens=10),
]
SEEDED_PROMPTS = [line(3 + 4 * i, seed=i) for i in range(len(SEEDED))]


@pytest.fixture(scope="module")
def alone(ids_llm: LLM) -> list[list[int]]:
    return [
        tokens(ids_llm.generate([prompt], params))[0]
        for prompt, params in zip(SEEDED_PROMPTS, SEEDED, strict=True)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_num_seqs": 3, "enable_prefix_caching": False},
        pytest.param({"pipeline_depth": 2, "max_num_batched_tokens": 11}, marks=pytest.mark.slow),
        pytest.param(
            {"kv_cache_memory_bytes": pool_bytes(checkpoint("llama"), 25, 4)},
            marks=pytest.mark.slow,
        ),
        {"kv_cache_memory_bytes": pool_bytes(checkpoint("llama"), 25, 4), "pipeline_depth": 2},
        {"seed": 99},
    ],
    ids=["batch", "three rows", "depth 2", "preemption", "preemption, depth 2", "engine seed"],
)
def test_seeded_tokens_do_not_depend_on_batch_or_settings(
    alone: list[list[int]], settings: dict[str, Any]
) -> None:
    with open_llm(**settings) as llm:
        outputs = llm.generate(SEEDED_PROMPTS, SEEDED)
        assert tokens(outputs) == alone
        backwards = llm.generate(SEEDED_PROMPTS[::-1], SEEDED[::-1])
        assert tokens(backwards)[::-1] == alone
        preempted = any(o.metrics and o.metrics.num_preemptions for o in outputs)
        assert preempted == ("kv_cache_memory_bytes" in settings)


def test_different_seeds_give_different_tokens(ids_llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(8)]
    outputs = ids_llm.generate([line(5)] * 8, params)
    assert len({tuple(t) for t in tokens(outputs)}) == 8


def test_unseeded_requests_differ_and_runs_repeat() -> None:
    """A seed of -1 counts as none. The engine's seed determines all unseeded requests."""
    runs = []
    for seed in (0, 0, 1):
        with open_llm(seed=seed) as llm:
            first = llm.generate([line(5)] * 4, SamplingParams(max_tokens=12))
            second = llm.generate([line(5)] * 2, SamplingParams(max_tokens=12, seed=-1))
            runs.append([tuple(t) for t in tokens(first + second)])
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 12


# ---- stopping --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def free_text(text_llm: LLM) -> str:
    """The model's text after "Hello" with seed 0; it contains only whole characters."""
    return run(text_llm, "Hello", **FREE).outputs[0].text


# ASCII only, and no special tokens.
ASCII = [i for i in range(3, 424) if (TOK.token(i) or "\u4f60").isascii() and TOK.decode([i])]
FREE: dict[str, Any] = {"seed": 0, "max_tokens": 30, "allowed_token_ids": ASCII}


@pytest.mark.parametrize(("depth", "include"), in_turn((1, 2), (False, True)))
def test_stop_strings_match_across_token_boundaries(
    free_text: str, depth: int, include: bool
) -> None:
    """Each piece of the text is a stop string once; the text ends at its first occurrence."""
    with open_llm(text_checkpoint(), pipeline_depth=depth) as llm:
        ids = run(llm, "Hello", **FREE).outputs[0].token_ids
        pieces = [free_text[i : i + 5] for i in range(0, len(free_text) - 5, 3)]
        params = [
            SamplingParams(stop=piece, include_stop_str_in_output=include, **FREE)
            for piece in pieces
        ]
        outputs = llm.generate(["Hello"] * len(pieces), params)
        crossed = 0
        for piece, output in zip(pieces, outputs, strict=True):
            (done,) = output.outputs
            end = free_text.index(piece) + (len(piece) if include else 0)
            assert done.text == free_text[:end], piece
            assert (done.finish_reason, done.stop_reason) == ("stop", piece)
            assert done.token_ids == ids[: len(done.token_ids)]
            crossed += not TOK.decode([done.token_ids[-1]]).endswith(piece)
        assert crossed > 0, "no stop string crossed a token boundary"
        scheduler = llm.engine.client.core.scheduler
        assert scheduler.num_running == 0 and scheduler.memory.kv.pools[0].num_used == 0


def test_earliest_stop_string_in_the_text_wins(text_llm: LLM, free_text: str) -> None:
    near, far = free_text[8:11], free_text[16:19]
    done = run(text_llm, "Hello", stop=[far, "never written", near], **FREE).outputs[0]
    assert (done.text, done.stop_reason) == (free_text[: free_text.index(near)], near)
    whole = run(text_llm, "Hello", stop="never written", **FREE).outputs[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (free_text, "length", None)


@pytest.mark.parametrize("depth", slow_but((1, 2), 1))
def test_stop_token_ids_end_the_output_after_min_tokens(depth: int) -> None:
    """Stop tokens are masked until min_tokens is reached."""
    with open_llm(pipeline_depth=depth) as llm:
        plain = greedy(llm, line(5), max_tokens=12)
        stop = plain[4]
        first = plain.index(stop)
        unused = next(i for i in range(VOCAB) if i not in plain)
        done = run(llm, line(5), temperature=0, max_tokens=12, stop_token_ids=[unused, stop])
        done = done.outputs[0]
        assert (done.token_ids, done.stop_reason) == (plain[: first + 1], stop)
        assert done.finish_reason == "stop"
        later = greedy(llm, line(5), max_tokens=12, min_tokens=8, stop_token_ids=[stop])
        assert stop not in later[:8] and later[:first] == plain[:first] and len(later) >= 8
        many = [i for i in range(VOCAB) if i not in plain[:first]]  # more than a row has room for
        done = run(llm, line(5), temperature=0, max_tokens=12, stop_token_ids=many).outputs[0]
        assert (done.token_ids, done.stop_reason) == (plain[: first + 1], stop)


@pytest.fixture(scope="module")
def eos_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config.json has two end tokens and sampling defaults."""
    folder = write_directory(tmp_path_factory.mktemp("eos"), "byte_level")
    write_checkpoint(folder, "llama", 424)
    values = {"eos_token_id": [300, 301], "temperature": 0.0, "top_p": 0.9, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_end_tokens_of_tokenizer_and_generation_config_stop(eos_folder: Path) -> None:
    """An end token gives no stop_reason unless it is also in stop_token_ids."""
    own = TOK.eos_token_id
    assert own is not None
    with open_llm(eos_folder) as llm:
        for eos in (own, 300, 301):
            bias = {eos: 100.0}
            done = run(llm, "Hello", max_tokens=5, logit_bias=bias).outputs[0]
            assert (done.token_ids, done.text) == ([eos], "")
            assert (done.finish_reason, done.stop_reason) == ("stop", None)
            done = run(llm, "Hello", max_tokens=5, logit_bias=bias, ignore_eos=True).outputs[0]
            assert (done.token_ids, done.finish_reason) == ([eos] * 5, "length")
            done = run(llm, "Hello", max_tokens=5, logit_bias=bias, min_tokens=3).outputs[0]
            assert eos not in done.token_ids[:3] and done.token_ids[3:] == [eos]
            done = run(llm, "Hello", max_tokens=5, logit_bias=bias, stop_token_ids=[eos]).outputs[0]
            assert (done.token_ids, done.stop_reason) == ([eos], eos)


def test_sampling_defaults_come_from_generation_config(eos_folder: Path) -> None:
    with open_llm(eos_folder) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.max_tokens) == (0.0, 7)
        explicit = SamplingParams(temperature=0, max_tokens=7)
        given = llm.generate(["Hello"])
        assert tokens(given) == tokens(llm.generate(["Hello"], explicit))
        assert len(given[0].outputs[0].token_ids) <= 7
        assert len(tokens(llm.generate(["Hello"], SamplingParams(ignore_eos=True)))[0]) == 16
    with open_llm(eos_folder, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        done = run(llm, "Hello", max_tokens=5, logit_bias={300: 100.0}).outputs[0]
        assert done.token_ids == [300]  # "none" drops sampling defaults, not end tokens


@pytest.mark.parametrize("depth", slow_but((1, 2), 2))
def test_without_max_tokens_output_fills_max_model_len(depth: int) -> None:
    with open_llm(pipeline_depth=depth, max_model_len=40) as llm:
        for length in (1, 17, 39):
            done = run(llm, line(length), temperature=0, max_tokens=None).outputs[0]
            assert len(done.token_ids) == 40 - length
            assert done.finish_reason == "length"
            assert done.token_ids == reference_tokens(
                checkpoint("llama"), line(length), 40 - length
            )
        assert len(greedy(llm, line(30), max_tokens=25)) == 10


# ---- log-probabilities -----------------------------------------------------------------------


def assert_logprobs(found: dict[int, Any], logits_V: torch.Tensor, chosen: int, count: int) -> None:
    """Compare with log_softmax: the chosen token, then the most probable ones, with ranks."""
    wanted_V = logits_V.log_softmax(-1)
    best = wanted_V.argsort(descending=True)[:count].tolist()
    assert list(found) == list(dict.fromkeys([chosen, *best]))
    for token_id, entry in found.items():
        assert entry.logprob == pytest.approx(float(wanted_V[token_id]), abs=2e-5)
        assert entry.rank == int((wanted_V > wanted_V[token_id]).sum()) + 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float32"},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        pytest.param({"max_num_batched_tokens": 40, "pipeline_depth": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"kv_cache_memory_bytes": pool_bytes(checkpoint("llama"), 25, 4)},
            marks=pytest.mark.slow,
        ),
        {"kv_cache_memory_bytes": pool_bytes(checkpoint("llama"), 25, 4), "pipeline_depth": 2},
    ],
    ids=["plain", "float32", "chunks", "chunks, depth 2", "preemption", "preemption, depth 2"],
)
def test_logprobs_equal_log_softmax_of_raw_logits(settings: dict[str, Any]) -> None:
    """Prompt and output have one entry for each position, whatever the sampling parameters."""
    folder = checkpoint("llama")
    prompts = [line(length, seed=length) for length in (1, 2, 9, 26, 20, 33)]
    wanted = [0, 1, 3, 5, 0, 2]
    params = [
        SamplingParams(
            max_tokens=12,
            seed=count,
            temperature=1.2,
            repetition_penalty=1.1,
            logprobs=count,
            prompt_logprobs=count,
        )
        for count in wanted
    ]
    with open_llm(folder, **settings) as llm:
        outputs = llm.generate(prompts, params)
        was_preempted = any(o.metrics and o.metrics.num_preemptions for o in outputs)
        assert was_preempted == ("kv_cache_memory_bytes" in settings)
    for prompt, output, count in zip(prompts, outputs, wanted, strict=True):
        assert_all_logprobs(folder, prompt, output, count)
        assert len(output.outputs[0].token_ids) == 12


def assert_all_logprobs(folder: Path, prompt: list[int], output: RequestOutput, count: int) -> None:
    """Check each position of prompt and output except the prompt's first."""
    (done,) = output.outputs
    logits_TV = reference_logits(folder, prompt + done.token_ids)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
    for pos, found in enumerate(output.prompt_logprobs[1:] + done.logprobs):
        chosen = (prompt + done.token_ids)[pos + 1]
        assert found is not None
        assert_logprobs(found, logits_TV[pos], chosen, count)
    total = sum(
        entry[token].logprob for entry, token in zip(done.logprobs, done.token_ids, strict=True)
    )
    assert done.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 40, "pipeline_depth": 2}, {"speculative_config": NGRAM}],
    ids=["plain", "depth 2", "drafts"],
)
def test_logprob_token_ids_return_the_requested_tokens(settings: dict[str, Any]) -> None:
    """Lists of several lengths, batched with a row that requests the most probable tokens."""
    folder = checkpoint("llama")
    named = [[5], [60, 3, 17, 3], None, list(range(20, 90))]
    base = {"max_tokens": 12, "temperature": 1.2, "ignore_eos": True}
    params = [
        SamplingParams(**base, seed=i, logprob_token_ids=ids, n=2)  # type: ignore[arg-type]
        for i, ids in enumerate(named)
    ]
    params[2].logprobs = 3
    prompts = [line(length, seed=length) * 2 for length in (3, 9, 26, 20)]
    with open_llm(folder, **settings) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output, ids in zip(prompts, outputs, named, strict=True):
        for done in output.outputs:
            logits_TV = reference_logits(folder, prompt + done.token_ids)
            assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids) == 12
            for pos, found in enumerate(done.logprobs):
                wanted_V = logits_TV[len(prompt) - 1 + pos].log_softmax(-1)
                chosen = done.token_ids[pos]
                if ids is None:
                    assert_logprobs(found, logits_TV[len(prompt) - 1 + pos], chosen, 3)
                    continue
                assert list(found) == list(dict.fromkeys([chosen, *ids]))
                for token_id, entry in found.items():
                    assert entry.logprob == pytest.approx(float(wanted_V[token_id]), abs=2e-5)
                    assert (entry.rank is None) == (token_id != chosen)
                rank = int((wanted_V > wanted_V[chosen]).sum()) + 1
                assert found[chosen].rank == rank


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}, {"speculative_config": NGRAM}],
    ids=["plain", "chunks", "drafts"],
)
def test_prompt_logprob_token_ids_return_the_requested_tokens(settings: dict[str, Any]) -> None:
    """Lists of several lengths that start at the first token or later, batched with a prompt that
    requests the most probable tokens."""
    folder, prompts = checkpoint("llama"), [line(length, seed=length) for length in (9, 70, 12, 5)]
    starts = [0, 50, None, 3]
    named = [
        None if start is None else [[i % 97, -1, 3, 3][: i % 5] for i in range(len(p) - 1 - start)]
        for p, start in zip(prompts, starts, strict=True)
    ]
    params = [
        SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
        if rows is None
        else SamplingParams(
            max_tokens=3, temperature=0, prompt_logprob_token_ids=rows, prompt_logprob_start=start
        )
        for rows, start in zip(named, starts, strict=True)
    ]
    with open_llm(folder, **settings) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output, rows, start in zip(prompts, outputs, named, starts, strict=True):
        logits_TV, found = reference_logits(folder, prompt), output.prompt_logprobs
        assert found is not None and len(found) == len(prompt)
        if rows is None or start is None:
            assert_logprobs(found[5] or {}, logits_TV[4], prompt[5], 2)
            continue
        assert found[: start + 1] == [None] * (start + 1)
        for pos, position in enumerate(found[start + 1 :], start + 1):
            assert position is not None
            wanted = [each for each in rows[pos - start - 1] if each >= 0]
            assert list(position) == list(dict.fromkeys([prompt[pos], *wanted]))
            expected_V = logits_TV[pos - 1].log_softmax(-1)
            for token_id, entry in position.items():
                assert entry.logprob == pytest.approx(float(expected_V[token_id]), abs=2e-5)


def test_prompt_logprob_token_ids_must_fit_prompt_and_vocabulary(ids_llm: LLM) -> None:
    params = SamplingParams(prompt_logprob_token_ids=[[1], [2]], prompt_logprob_start=1)
    with pytest.raises(RequestError, match="has 2 lists, but the prompt has 1 tokens after"):
        ids_llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    wrong = SamplingParams(prompt_logprob_token_ids=[[1], [97]])
    with pytest.raises(RequestError, match="token ids below 97, got 97"):
        ids_llm.generate({"prompt_token_ids": [5, 6, 7]}, wrong, use_tqdm=False)


@pytest.mark.parametrize("depth", slow_but((1, 2), 2))
def test_prompt_logprobs_survive_preemption_within_the_prompt(depth: int) -> None:
    """Three short requests grow while a long prompt is computed, until one is preempted."""
    folder = checkpoint("llama")
    prompts = [line(length, seed=length) for length in (4, 5, 6, 60)]
    params = [
        SamplingParams(temperature=0, max_tokens=count, logprobs=1, prompt_logprobs=1)
        for count in (30, 30, 30, 4)
    ]
    pool = pool_bytes(folder, 25, 4)
    settings = {"kv_cache_memory_bytes": pool, "max_num_batched_tokens": 7}
    with open_llm(folder, pipeline_depth=depth, **settings) as llm:
        events: list[Any] = []
        llm.engine.client.core.subscribe(events.append)
        outputs = llm.generate(prompts, params)
    lost = [e.num_lost_tokens for e in events if type(e).__name__ == "Preempted"]
    assert any(0 < tokens < 60 for tokens in lost), "no request was preempted within its prompt"
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_all_logprobs(folder, prompt, output, 1)


def test_prompt_logprobs_skip_the_prefix_cache(ids_llm: LLM) -> None:
    greedy(ids_llm, line(30))
    output = run(ids_llm, line(30), prompt_logprobs=1)
    assert output.num_cached_tokens == 0 and len(output.prompt_logprobs or []) == 30
    assert run(ids_llm, line(30)).num_cached_tokens == 28


def test_logprobs_of_minus_one_cover_the_whole_vocabulary() -> None:
    with open_llm(max_logprobs=-1) as llm:
        output = run(llm, line(4), max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    entries = (output.prompt_logprobs or [])[1:] + (output.outputs[0].logprobs or [])
    assert len(entries) == 5
    for entry in entries:
        assert entry is not None and len(entry) == VOCAB
        assert sum(2.718281828**e.logprob for e in entry.values()) == pytest.approx(1, abs=1e-4)


def test_decoded_tokens_of_logprobs_join_to_the_text(text_llm: LLM) -> None:
    output = run(text_llm, "Hello", logprobs=2, prompt_logprobs=0, **FREE)
    done = output.outputs[0]
    shown = [e[t].decoded_token for e, t in zip(done.logprobs or [], done.token_ids, strict=True)]
    assert "".join(text or "" for text in shown) == done.text


# ---- changed logits --------------------------------------------------------------------------


def test_logit_bias_and_allowed_token_ids_restrict_the_output(ids_llm: LLM) -> None:
    plain = greedy(ids_llm, line(6), max_tokens=10)
    banned = {plain[2]: -100.0}
    assert plain[2] not in greedy(ids_llm, line(6), max_tokens=10, logit_bias=banned)
    assert greedy(ids_llm, line(6), max_tokens=4, logit_bias={11: 100.0}) == [11] * 4
    allowed = [3, 50, 71]
    found = run(ids_llm, line(6), seed=1, max_tokens=40, allowed_token_ids=allowed).outputs[0]
    assert set(found.token_ids) == set(allowed)
    done = run(ids_llm, line(6), temperature=0, allowed_token_ids=[5], logit_bias={9: 100.0})
    assert set(done.outputs[0].token_ids) == {5}


def test_empty_token_mask_fails_only_its_request(ids_llm: LLM) -> None:
    """allowed_token_ids and min_tokens contradict each other."""
    wrong = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2)
    good = SamplingParams(temperature=0, max_tokens=6)
    outputs = ids_llm.generate([line(6), line(7)], [wrong, good])
    done = outputs[0].outputs[0]
    assert done.finish_reason == "error" and done.error is not None
    assert "leave no token" in done.error.message
    assert tokens(outputs)[1] == reference_tokens(checkpoint("llama"), line(7), 6)


def test_bad_words_never_appear(text_llm: LLM) -> None:
    """The banned words are ones that the model writes otherwise, of one token and of two."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "allowed_token_ids": ASCII}
    plain = run(text_llm, "Hello", **params).outputs[0]
    one, two = TOK.decode(plain.token_ids[1:2]), TOK.decode(plain.token_ids[4:6])
    assert TOK.encode(one) == plain.token_ids[1:2] and TOK.encode(two) == plain.token_ids[4:6]
    without = run(text_llm, "Hello", bad_words=[one, two], **params).outputs[0]
    assert one in plain.text and one not in without.text
    assert two in plain.text and two not in without.text
    assert without.token_ids[:1] == plain.token_ids[:1]


@pytest.mark.parametrize("depth", slow_but((1, 2), 1))
def test_penalties_match_a_reference_loop(depth: int) -> None:
    """Repetition counts prompt and output; presence and frequency the output alone."""
    cases = [(1.5, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.0, 0.7), (1.3, 0.5, 0.4), (0.8, -1.0, -0.3)]
    folder, prompt = checkpoint("llama"), line(12)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=12,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        for repetition, presence, frequency in cases
    ]
    with open_llm(pipeline_depth=depth) as llm:
        outputs = llm.generate([prompt] * len(cases), params)
    plain = reference_tokens(folder, prompt, 12)
    for case, found in zip(cases, tokens(outputs), strict=True):
        assert found == penalised_tokens(folder, prompt, 12, *case)
        assert found != plain, "this penalty changed no token"


def penalised_tokens(
    folder: Path, prompt: list[int], count: int, repetition: float, presence: float, freq: float
) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        logits = reference_logits(folder, prompt + output)[-1].tolist()
        for token in set(prompt + output):
            logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        for token in set(output):
            logits[token] -= presence + freq * output.count(token)
        output.append(max(range(VOCAB), key=logits.__getitem__))
    return output


# ---- invalid parameters ----------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    ("n", 0, "n must be an integer from 1"),
    ("n", 1.5, "n must be an integer"),
    ("temperature", -0.1, "temperature must be from 0 to 2, got -0.1"),
    ("temperature", 2.1, "from 0 to 2"),
    ("temperature", float("nan"), "a finite number"),
    ("temperature", "hot", "a finite number, got 'hot'"),
    ("top_p", 0.0, r"in \(0, 1\]"),
    ("top_p", 1.1, r"in \(0, 1\]"),
    ("top_k", -2, "top_k must be 0 or -1"),
    ("top_k", 2.5, "top_k must be"),
    ("min_p", -0.1, r"in \[0, 1\]"),
    ("presence_penalty", 2.1, r"in \[-2, 2\]"),
    ("frequency_penalty", -2.1, r"in \[-2, 2\]"),
    ("repetition_penalty", 0, "from 0.01"),
    ("repetition_penalty", float("inf"), "to 100"),
    ("seed", 2**63, "64-bit"),
    ("seed", 1.5, "64-bit"),
    ("max_tokens", 0, "at least 1, or None"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "at most max_tokens=16"),
    ("logprobs", -2, "None, -1"),
    ("logprobs", 21, "more than max_logprobs=20; request fewer or raise max_logprobs"),
    ("logprobs", -1, "more than max_logprobs=20"),
    ("prompt_logprobs", 21, "prompt_logprobs=21 is more than max_logprobs=20"),
    ("stop", "", "non-empty strings"),
    ("stop", ["a", ""], "non-empty strings"),
    ("bad_words", [""], "non-empty strings"),
    ("stop_token_ids", ["a"], "a list of integers"),
    ("stop_token_ids", [424], "token ids below 424, got 424"),
    ("allowed_token_ids", [], "None or a non-empty list"),
    ("allowed_token_ids", [424], "token ids below 424"),
    ("allowed_token_ids", [-1], "token ids below 424"),
    ("logit_bias", {424: 1.0}, "logit_bias must be token ids below 424"),
    ("n", 16384, "n=16384 is more than max_num_seqs=.*raise max_num_seqs"),
    ("best_of", 0, "best_of must be None or an integer from n=1"),
    ("best_of", 16384, "best_of=16384 is more than max_num_seqs="),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_invalid_parameters_are_rejected(
    text_llm: LLM, name: str, value: Any, message: str
) -> None:
    """The error has the name, the value and the rule; no prompt of the batch runs."""
    with pytest.raises(RequestError, match=message):
        text_llm.generate(["Hello", "Hello"], [SamplingParams(), SamplingParams(**{name: value})])
    assert text_llm.engine.client.num_unfinished == 0
    assert not text_llm.engine.client.core.has_work

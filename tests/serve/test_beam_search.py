"""Beam search for its users: `LLM.beam_search`, and `generate` with use_beam_search."""

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.base.errors import RequestError
from tests.support.models.reference_checkpoints import checkpoint, reference_beams, text_checkpoint

PROMPTS = [[7, 3, 9, 1, 12, 44], [5, 80, 23], [61, 2, 2, 90, 33, 8, 15]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(checkpoint("llama")), dtype="float64", max_num_seqs=16, disable_log_stats=True)


def reference(prompt: list[int], width: int, num_tokens: int) -> list[list[int]]:
    """Return the output tokens of transformers' beams, best first."""
    return [list(tokens) for tokens, _ in reference_beams(tuple(prompt), width, num_tokens)]


def test_beam_search_matches_transformers(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=15))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        found = [beam.tokens for beam in output.sequences]
        assert found == [prompt + tokens for tokens in reference(prompt, 4, 15)]
        logprobs = [beam.cum_logprob for beam in output.sequences]
        assert logprobs == sorted(logprobs, reverse=True)  # all of one length


def test_mixed_decoding_methods_match_single_requests(llm: LLM) -> None:
    """Greedy, sampled, n and beams together (P 4.4, mixed decoding methods)."""
    methods = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0.9, seed=4, max_tokens=12),
        SamplingParams(n=3, temperature=1.1, seed=5, max_tokens=12),
        SamplingParams(n=2, best_of=4, temperature=1.1, seed=6, max_tokens=12),
        SamplingParams(n=3, use_beam_search=True, max_tokens=12),
        SamplingParams(n=1, beam_width=3, use_beam_search=True, max_tokens=12),
    ]
    prompts = [{"prompt_token_ids": PROMPTS[i % 3]} for i in range(len(methods))]
    together = llm.generate(prompts, methods, use_tqdm=False)
    for prompt, params, output in zip(prompts, methods, together, strict=True):
        llm.reset_prefix_cache()
        [alone] = llm.generate(prompt, params, use_tqdm=False)
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in output.outputs]
        assert [c.index for c in output.outputs] == list(range(params.n))
    assert together[5].outputs[0].token_ids == reference(PROMPTS[2], 3, 12)[0]


def test_beams_have_text_and_finish_reasons() -> None:
    with LLM(str(text_checkpoint()), dtype="float64", disable_log_stats=True) as llm:
        [output] = llm.generate(
            ["The fox"], SamplingParams(n=3, use_beam_search=True, max_tokens=8), use_tqdm=False
        )
        tokenizer = llm.get_tokenizer()
        for beam in output.outputs:
            assert beam.finish_reason == "length"
            assert beam.text == tokenizer.decode(beam.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("num_tokens", [1, 2, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [8, 11])
def test_beam_width_may_equal_vocabulary_and_rows(width: int, num_tokens: int) -> None:
    """The width is also the number of rows; several prompts run together."""
    folder = checkpoint("llama", 11)
    prompts = [[1, 5, 9], [2, 7, 7, 0]]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    search = BeamSearchParams(beam_width=width, max_tokens=num_tokens)
    with LLM(str(folder), dtype="float64", max_num_seqs=width, disable_log_stats=True) as llm:
        outputs = llm.beam_search(given, search)
        generated = llm.generate(given, search.sampling_params(), use_tqdm=False)
    for prompt, output, same in zip(prompts, outputs, generated, strict=True):
        found = reference_beams(tuple(prompt), width, num_tokens, folder=folder)
        assert [beam.tokens for beam in output.sequences] == [prompt + list(t) for t, _ in found]
        assert [beam.token_ids for beam in same.outputs] == [list(tokens) for tokens, _ in found]


def test_beam_width_above_the_vocabulary_is_rejected() -> None:
    """No prompt of the batch runs."""
    prompts = [{"prompt_token_ids": [1, 5]}] * 2
    wide = BeamSearchParams(beam_width=12, max_tokens=1)
    stopped = SamplingParams(n=1, beam_width=9, use_beam_search=True, stop_token_ids=[0, 3, 10])
    with LLM(str(checkpoint("llama", 11)), max_num_seqs=16, disable_log_stats=True) as llm:
        with pytest.raises(RequestError, match="^n=12 is more than the 11 tokens"):
            llm.beam_search(prompts, [BeamSearchParams(beam_width=2, max_tokens=1), wide])
        with pytest.raises(RequestError, match="^beam_width=9 is more than the 8 tokens"):
            llm.generate(prompts, stopped, use_tqdm=False)
        assert llm.engine.client.num_unfinished == 0


def test_beams_cannot_be_streamed(llm: LLM) -> None:
    params = SamplingParams(n=2, use_beam_search=True)
    with pytest.raises(RequestError, match="use_beam_search"):
        next(llm.stream({"prompt_token_ids": [1, 2]}, params))

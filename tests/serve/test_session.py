"""Sessions in Python give the outputs of requests with the same tokens. Nothing is tokenised or
computed twice."""

from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, RequestError
from quire.base.requests.outputs import RequestOutput
from tests.support.models.reference_checkpoints import checkpoint

SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "disable_log_stats": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    assert llm.engine.client.held() == [], "a closed session retains a request"
    view = llm.engine.client.core.view()
    assert view.num_free_blocks == view.num_blocks


def params(num: int = 12, seed: int = 1) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=num, ignore_eos=True)


def recomputed(llm: LLM, token_ids: list[int], wanted: SamplingParams) -> list[int]:
    """Return the output for these tokens, computed without prefix hits."""
    prompt = {"prompt_token_ids": token_ids, "cache_salt": "of nobody else"}
    llm.reset_prefix_cache()
    [output] = llm.generate([prompt], wanted, use_tqdm=False)
    return output.outputs[0].token_ids


def got(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_session_continues_forks_and_rewinds(llm: LLM) -> None:
    with llm.session() as story:
        first = got(story.append("Once upon a time there was a little fox.").generate(params()))
        start = llm.get_tokenizer().encode("Once upon a time there was a little fox.")
        assert story.token_ids == start + first
        before = story.token_ids
        output = story.append(" The bear").generate(params(seed=2))
        assert output.num_cached_tokens == len(before) - 1, "all but the last token are cached"
        with story.fork(len(before) - 3) as other:
            assert other.token_ids == before[:-3]
            output = other.generate(params(seed=3))
            assert output.num_cached_tokens == len(before) - 4
            branch = got(output)
            story.close()  # the fork that shares its blocks continues
            more = got(other.rewind(2).append([40, 41]).generate(params(seed=4)))
            assert other.token_ids == before[:-3] + branch[:-2] + [40, 41] + more
            whole = list(other.token_ids)
    assert first == recomputed(llm, start, params())
    assert branch == recomputed(llm, before[:-3], params(seed=3))
    assert more == recomputed(llm, whole[: -len(more)], params(seed=4))


def test_conversation_is_never_tokenised_twice(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    with llm.session() as talk:
        output = talk.append(messages).generate(greedy)
        seen = list(talk.token_ids)
        answer = {"role": "assistant", "content": output.outputs[0].text}
        more = [{"role": "user", "content": "And a bear?"}]
        output = talk.append(more).generate(greedy)
        assert talk.token_ids[: len(seen)] == seen
        assert output.num_cached_tokens == len(seen) - 1
        [expected] = llm.chat([*messages, answer, *more], greedy, use_tqdm=False)
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert output.outputs[0].text == expected.outputs[0].text


def test_lost_blocks_of_a_session_are_recomputed(llm: LLM) -> None:
    with llm.session() as story:
        story.append("Once upon a time").generate(params())
        tokens = list(story.token_ids)
        for held in llm.engine.client.held():
            llm.engine.client.keep(held.id, 0.0)
        llm.reset_prefix_cache()
        assert got(story.generate(params(seed=5))) == recomputed(llm, tokens, params(seed=5))


def test_invalid_calls_are_rejected(llm: LLM) -> None:
    with llm.session() as story:
        with pytest.raises(RequestError, match="no tokens yet"):
            story.generate()
        story.append("Once")
        with pytest.raises(RequestError, match="call fork"):
            story.generate(SamplingParams(n=2))
        for call in (lambda: story.fork(100), lambda: story.rewind(100), lambda: story.fork(-1)):
            with pytest.raises(RequestError, match="the number of tokens"):
                call()
        story.rewind(len(story.token_ids))
        assert story.token_ids == []
        story.append([1] * 300)
        with pytest.raises(RequestError, match="max_model_len"):
            story.generate(params())


def test_sessions_with_hooks_are_rejected() -> None:
    class Nothing:
        def before_admission(self, request: object) -> None: ...

    made = LLM("demo", hooks=[Nothing()], **SETTINGS)  # type: ignore[arg-type]
    with made, pytest.raises(ConfigError, match="hooks"):
        made.session()


@pytest.mark.slow
def test_session_stays_on_one_core(llm: LLM) -> None:
    folder = str(checkpoint("llama"))
    settings = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "disable_log_stats": True}
    with LLM(folder, data_parallel_size=2, **settings) as made:  # type: ignore[arg-type]
        sessions = [made.session() for _ in range(3)]
        for number, session in enumerate(sessions):
            session.append([5 + number, 6, 7, 8, 9, 10]).generate(params(4))
        for session in sessions:
            output = session.fork().generate(params(4))
            assert output.num_cached_tokens == len(output.prompt_token_ids) - 1

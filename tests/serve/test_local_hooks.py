"""`LLM` with hooks, and the example's word filter: prompts, outputs and streams."""

import importlib.util
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, HookFailed, RequestError
from quire.base.requests.hooks import EndRequest, HookContext, HookPiece, HookRequest
from quire.base.requests.outputs import RequestOutput
from quire.serve.hooks.hooks import Hooks
from quire.serve.python.local_hooks import LocalHooks
from tests.serve.test_llm import assert_idle
from tests.support.processes.forks import run_forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "word_filter.py"
SMALL: dict[str, Any] = {"disable_log_stats": True, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(temperature=1.2, max_tokens=24, ignore_eos=True, n=2, seed=5)
CHAT = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", **SMALL) as llm:
        yield llm


@pytest.fixture
def hooked(plain: LLM) -> Iterator[Any]:
    """Yield hooked(hooks...), which gives the engine other hooks; none is left afterwards."""

    def use(*hooks: Any, timeout_s: float = 30.0) -> LLM:
        plain._hooks = LocalHooks(Hooks(hooks, timeout_s), plain.engine)
        return plain

    yield use
    if plain._hooks is not None:
        plain._hooks.close()
    plain._hooks = None
    plain.engine.client.step()
    assert_idle(plain)


def test_hook_pauses_a_stream_and_changes_its_priority(plain: LLM, hooked: Any) -> None:
    priorities: list[int] = []

    class Acting:
        def before_admission(self, request: HookRequest) -> None:
            request.context.actions.set_priority(4)

        def on_output(self, piece: HookPiece) -> None:
            context = piece.context
            [request] = plain.engine.client.core.requests() or [None]
            if request is not None:
                priorities.append(request.request.priority)
            if not context.state:
                context.state["acted"] = True
                context.actions.set_priority(-2)
                context.actions.pause(0.02)

    expected = "".join(text(each) for each in plain.stream("Once", GREEDY))
    found = "".join(text(each) for each in hooked(Acting()).stream("Once", GREEDY))
    assert found == expected
    assert priorities[:2] == [4, -2] and set(priorities[1:]) == {-2}
    hooked(Acting()).generate("Once", GREEDY, use_tqdm=False)


def test_hook_cannot_ask_another_model_in_llm(hooked: Any) -> None:
    class Asking:
        async def on_output(self, piece: HookPiece) -> None:
            await piece.context.actions.ask("demo", "x")

    with pytest.raises(HookFailed):
        list(hooked(Asking()).stream("Once", GREEDY))


class Upper:
    async def on_output(self, piece: HookPiece) -> HookPiece:
        return replace(piece, text=piece.text.upper())


class Ending:
    def __init__(self, after: int, choice: int = 0) -> None:
        self.after, self.choice = after, choice

    def on_output(self, piece: HookPiece) -> None:
        count = piece.context.state.get(piece.choice, 0)
        piece.context.state[piece.choice] = count + 1
        if piece.choice == self.choice and count >= self.after:
            raise EndRequest("enough")


class Prompts:
    def __init__(self) -> None:
        self.seen: list[HookRequest] = []

    def before_admission(self, request: HookRequest) -> HookRequest | None:
        self.seen.append(request)
        if any("forbidden" in text for text in request.texts):
            raise EndRequest("no such word")
        if request.messages is not None:
            return replace(request, messages=CHAT)
        assert request.prompt is not None
        return replace(request, prompt=request.prompt.replace("war", "story"))


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


def test_hook_changes_prompts_of_all_forms(plain: LLM, hooked: Any) -> None:
    def ids(text: str) -> list[int]:
        return plain.get_tokenizer().encode(text, add_special_tokens=False)

    [expected] = plain.generate("A story of", GREEDY, False)
    [answer] = plain.chat(CHAT, GREEDY, False)
    hook = Prompts()
    llm = hooked(hook)
    given: list[Any] = [
        "A war of", {"prompt": "A war of"}, {"prompt_token_ids": ids("A war of")}, ids("A war of"),
    ]  # fmt: skip
    for output in llm.generate(given, GREEDY, False):
        assert output.outputs == expected.outputs
        assert output.prompt_token_ids == expected.prompt_token_ids
    [output] = llm.chat([{"role": "user", "content": "war"}], GREEDY, False)
    assert output.outputs == answer.outputs
    pieces = list(llm.stream([{"role": "user", "content": "war"}], GREEDY))
    assert "".join(map(text, pieces)) == text(answer)
    assert [seen.prompt for seen in hook.seen] == ["A war of"] * 4 + [None] * 2
    assert len({seen.context.request_id for seen in hook.seen}) == 6


def test_hook_rejects_a_prompt_before_any_runs(hooked: Any) -> None:
    llm = hooked(Prompts())
    odd = [5, 1 << 20]
    for prompts in (["Once", "a forbidden thing"], [{"prompt": "forbidden"}]):
        with pytest.raises(RequestError, match="no such word"):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="no such word"):
        next(llm.stream("forbidden"))
    with pytest.raises(RequestError, match="token ids from 0 to"):
        llm.generate([odd], GREEDY)


def test_hook_changes_the_text_of_outputs(plain: LLM, hooked: Any) -> None:
    [expected] = plain.generate("Once upon a time", GREEDY, False)
    llm = hooked(Upper())
    [output] = llm.generate("Once upon a time", GREEDY, False)
    [completion] = output.outputs
    assert completion.text == text(expected).upper()
    assert (completion.token_ids, completion.logprobs, completion.cumulative_logprob) == (
        [], None, None,
    )  # fmt: skip
    pieces = list(llm.stream("Once upon a time", GREEDY))
    assert "".join(map(text, pieces)) == text(expected).upper() and len(pieces) > 5
    assert not any(piece.outputs[0].token_ids for piece in pieces)


def test_passive_hook_leaves_outputs_unchanged(plain: LLM, hooked: Any) -> None:
    [expected] = plain.generate("Once upon a time", GREEDY, False)
    llm = hooked(Ending(1 << 20))
    assert llm.generate("Once upon a time", GREEDY, False)[0].outputs == expected.outputs
    last = list(llm.stream("Once upon a time", GREEDY))[-1].outputs[0]
    assert last.token_ids == expected.outputs[0].token_ids
    assert last.logprobs == expected.outputs[0].logprobs


def test_hook_ends_a_choice_or_a_stream(hooked: Any) -> None:
    llm = hooked(Ending(0, choice=1))
    one, other = llm.generate(["Once", "Why"], SAMPLED, False)
    for output in (one, other):
        first, second = output.outputs
        assert first.finish_reason == "length" and first.text
        assert (second.finish_reason, second.stop_reason) == ("content_filter", "enough")
        assert second.text == "" and not second.token_ids
    llm = hooked(Ending(3, choice=1))
    *_, last = pieces = list(llm.stream("Once", SAMPLED))
    assert last.finished and len(pieces) < 24
    ends = {each.index: each.finish_reason for each in last.outputs if each.finish_reason}
    assert ends == {0: "content_filter", 1: "content_filter"}


def test_failing_hook_fails_only_its_request(hooked: Any) -> None:
    class Failing:
        def on_output(self, piece: HookPiece) -> None:
            if piece.context.request_id == "hooked-1":
                raise RuntimeError("a secret path")

    fine, failed = hooked(Failing()).generate(["Once", "Why"], GREEDY, False)
    assert text(fine) and fine.outputs[0].finish_reason == "length"
    [completion] = failed.outputs
    assert completion.finish_reason == "error" and completion.error is not None
    assert completion.error.code == "hook_failed" and "secret" not in completion.error.message
    assert completion.text == "" and not completion.token_ids
    llm = hooked(Failing())
    assert list(llm.stream("Once", GREEDY))
    with pytest.raises(HookFailed):
        list(llm.stream("Why", GREEDY))


def test_hanging_hook_times_out(hooked: Any) -> None:
    go = threading.Event()

    class Hanging:
        def on_output(self, piece: HookPiece) -> None:
            go.wait()

    [output] = hooked(Hanging(), timeout_s=0.1).generate("Once", GREEDY, False)
    go.set()
    assert output.outputs[0].error is not None
    assert output.outputs[0].error.code == "hook_timed_out"


def test_llm_rejects_an_invalid_hook() -> None:
    with pytest.raises(ConfigError, match="is not a hook"):
        LLM("demo", hooks=[object()])


# ---- the example -------------------------------------------------------------------------------


def word_filter(*words: str) -> Any:
    spec = importlib.util.spec_from_file_location("word_filter", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WordFilter(words)


def test_word_filter_matches_across_pieces() -> None:
    text, wanted = (
        "The fox and the Foxglove, a firefox; fo x",
        "The *** and the ********, a fire***; fo x",
    )
    rng = random.Random(3)
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        context, hook = HookContext("id", "", "m"), word_filter("foxglove", "fox")
        pieces = [
            HookPiece(context, 0, "content", part, index == len(parts) - 1)
            for index, part in enumerate(parts)
        ]
        assert "".join(hook.on_output(piece).text for piece in pieces) == wanted


def test_example_runs_from_the_command_line(plain: LLM) -> None:
    question = "Tell me a story about an animal."
    params = SamplingParams(temperature=0.0, max_tokens=64)
    [expected] = plain.chat([{"role": "user", "content": question}], params, False)
    word = max(text(expected).split(), key=len)

    def run(question: str) -> str:
        command = [sys.executable, str(EXAMPLE), "--word", word, question]
        done = run_forked(command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run(question)
    assert shown.rstrip() == text(expected).replace(word, "*" * len(word)).rstrip()
    assert word not in shown
    assert run(f"What is {word}?").startswith("refused: the prompt has a word")

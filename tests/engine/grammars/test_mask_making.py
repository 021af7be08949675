"""Masks after draft tokens equal a separate matcher's masks, whatever was drafted before."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from quire.base.messages import Draft
from quire.engine.attachments.recorder import Recorder
from quire.engine.grammars import compiler as grammar_compiler
from quire.engine.grammars.compiler import Compiler
from quire.engine.grammars.mask_making import MaskMaker
from quire.engine.grammars.matchers import DraftLimits, Follower, Guided, MaskRequest
from quire.engine.recording.files import read_recording
from quire.scheduler.core.sequence import Sequence
from quire.tools.replay import replay_all
from tests.engine.grammars.test_grammars import BUDGET, JSON, NUMBERS, RECOMPUTE, SWAP, WORDS
from tests.support.cases import in_turn
from tests.support.engine.attachments import StandIn, draft_with
from tests.support.engine.guided_engine import END, GuidedBench, allowed_ids, lark, vocabulary
from tests.support.engine.updates import error_of, reason_of
from tests.support.scheduler.fake_device import VOCAB, Curse, make_request, next_token

LIMITS = DraftLimits(32, 32)
ENDS = lark('"a" /[0-9]/ "bc"')


def ids_of(text: str) -> list[int]:
    return vocabulary().tokens.tokenize_str(text)


def allowed_after(grammar: str, token_ids: list[int]) -> list[int]:
    matcher = LLMatcher(vocabulary().tokens, grammar)
    assert matcher.consume_tokens(token_ids)
    return allowed_ids(np.frombuffer(matcher.compute_bitmask(), np.int32)[:2])


class Maker:
    def __init__(self) -> None:
        self.compiler = Compiler(vocabulary)
        self.masks = MaskMaker(self.compiler, VOCAB, 1)

    def guided(self, grammar: str, **params: Any) -> Guided:
        request = make_request("0", [1], grammar=grammar, **params)
        return Guided(request, self.compiler.compile(grammar))

    def made(
        self, guided: Guided, token_ids: list[int], draft_ids: list[int], row: int = 3
    ) -> list[list[int]]:
        wanted = MaskRequest(row, guided, 0, np.array(token_ids, np.int32), tuple(draft_ids))
        masks = self.masks.make(np.array([row], np.int32), [wanted])
        assert not masks.errors
        return [allowed_ids(words) for words in masks.words[0]]


@pytest.mark.parametrize("grammar", [WORDS, NUMBERS, JSON])
def test_mask_of_each_position_follows_its_draft_token(grammar: str) -> None:
    """Earlier draft tokens were accepted or rejected."""
    choose, maker = random.Random(1), Maker()
    guided, known = maker.guided(grammar), []
    while True:
        draft_ids: list[int] = []
        for _ in range(choose.randrange(5)):
            allowed = allowed_after(grammar, known + draft_ids)
            draft_ids.append(choose.choice(allowed))
            if draft_ids[-1] == END:
                break
        found = maker.made(guided, known, draft_ids)
        for i, allowed in enumerate(found):
            is_end = i > 0 and draft_ids[i - 1] == END
            assert allowed == ([] if is_end else allowed_after(grammar, known + draft_ids[:i]))
        num_accepted = choose.randrange(len(draft_ids) + 1)
        known += draft_ids[:num_accepted]
        if END in known or END in allowed_after(grammar, known) or len(known) > 15:
            return
        known.append(choose.choice(allowed_after(grammar, known)))


LIMITED = 'item*\nitem: "ab" aa "true" /[0-9]/\naa[max_tokens=3]: /[cde]+/'
STOPPED = 'item*\nitem: "ab" aa /[0-9]/\naa[stop="true"]: /[a-e]+/'


@pytest.mark.parametrize("start", [LIMITED, STOPPED])
def test_drafts_without_rollback_reuse_one_matcher(
    start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first draft detects that the grammar cannot roll back. Later steps only consume the new
    tokens."""
    maker, grammar, made = Maker(), lark(start), list[Follower]()
    guided, text = maker.guided(grammar), ids_of("abcdtrue7" * 12)
    make_fresh = Guided._fresh

    def counted(guided: Guided) -> Follower:
        made.append(make_fresh(guided))
        return made[-1]

    monkeypatch.setattr(Guided, "_fresh", counted)
    for num in range(len(text) - 8):
        known = np.array(text[:num], np.int32)
        requested = MaskRequest(3, guided, 0, known)
        draft = maker.masks.draft(
            requested, lambda ahead, num=num: text[num + len(ahead) :], DraftLimits(8, 8)
        )
        assert draft.token_ids == text[num : num + 8]
        assert maker.made(guided, text[:num], [])[0] == allowed_after(grammar, text[:num])
    assert len(made) == 2 and not guided.rolls_back


def test_masks_after_a_forbidden_draft_token_are_empty() -> None:
    maker = Maker()
    guided = maker.guided(ENDS)
    found = maker.made(guided, ids_of("a"), ids_of("1") + ids_of("a") + ids_of("bc"))
    assert [len(allowed) for allowed in found] == [10, 1, 0, 0]
    assert maker.made(guided, ids_of("a1"), []) == [allowed_after(ENDS, ids_of("a1"))]


def test_each_row_has_masks_for_its_own_draft() -> None:
    maker = Maker()
    few, many = maker.guided(ENDS), maker.guided(WORDS)
    nothing = np.empty(0, np.int32)
    wanted = [
        MaskRequest(5, few, 0, nothing, tuple(ids_of("a"))),
        MaskRequest(2, None),
        MaskRequest(1, many, 0, nothing, tuple(ids_of("dad"))),
    ]
    masks = maker.masks.make(np.array([5, 2, 1], np.int32), wanted)
    first, ended, last = masks.of(np.array([5, 2, 1], np.int32))
    assert len(first) == 4
    assert [allowed_ids(words) for words in first] == [
        allowed_after(ENDS, []), allowed_after(ENDS, ids_of("a")), [], []
    ]  # fmt: skip
    assert allowed_ids(ended[0]) == list(range(VOCAB)) and not ended[1:].any()
    assert [allowed_ids(words) for words in last] == [
        allowed_after(WORDS, ids_of("dad")[:i]) for i in range(4)
    ]


def test_ignored_end_tokens_are_masked_unless_nothing_else_is_allowed() -> None:
    maker = Maker()
    guided = maker.guided(lark("/[ab]{1,3}/"), ignore_eos=True)
    found = maker.made(guided, [], ids_of("b") * 3)
    assert [END in allowed for allowed in found] == [False, False, False, True]


def test_grammar_limit_reached_in_a_draft_cuts_only_the_draft(monkeypatch: Any) -> None:
    """The request continues, and its next step gets masks again."""
    monkeypatch.setattr(grammar_compiler, "MAX_LEXER_STATES", 40)
    maker = Maker()
    guided = maker.guided(lark("/[a-d]{60}/"))
    found = maker.made(guided, [], ids_of("d") * 40)
    num = next(i for i, allowed in enumerate(found) if not allowed)
    assert 0 < num < 40 and not any(found[num:])
    assert maker.made(guided, ids_of("d"), [])[0]


def nothing(_: Any) -> list[int]:
    return []


def test_forced_draft_tokens_are_the_only_allowed_ones() -> None:
    maker = Maker()
    guided = maker.guided(JSON)
    opened = MaskRequest(0, guided, 0, np.array(ids_of("{"), np.int32))
    forced = maker.masks.draft(opened, nothing, LIMITS).token_ids
    assert maker.masks.draft(opened, nothing, DraftLimits(1, 1)).token_ids == forced[:1]
    known = ids_of("{")
    for token in forced:
        assert allowed_after(JSON, known) == [token]
        known.append(token)
    assert len(allowed_after(JSON, known)) > 1
    draft_ids = ids_of("12") + ids_of("a")
    wanted = MaskRequest(0, maker.guided(NUMBERS), 0, np.empty(0, np.int32), tuple(draft_ids))
    assert maker.masks.cut(wanted) == len(ids_of("12"))
    assert maker.masks.draft(MaskRequest(0, None), nothing, LIMITS).token_ids == []
    assert maker.masks.cut(MaskRequest(0, None)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_masks_of_a_draft_equal_those_of_a_matcher(seed: int, monkeypatch: Any) -> None:
    """Masks of forced tokens are written without calling the library."""
    maker, choose = Maker(), random.Random(seed)
    grammar = lark('"{\\"ab\\": " /[0-9]{1,3}/ ", \\"true\\": " /[a-d]{2,4}/ "}"')
    guided, known = maker.guided(grammar), list[int]()

    def propose(ahead: Any) -> list[int]:
        allowed = allowed_after(grammar, [*known, *ahead])
        return [choose.choice(allowed), choose.randrange(VOCAB)]

    computed = list[int]()
    compute = maker.masks._compute
    monkeypatch.setattr(
        maker.masks, "_compute", lambda jobs, masks: computed.append(1) or compute(jobs, masks)
    )
    num_drafted = num_forced = 0
    while END not in known and END not in allowed_after(grammar, known):
        requested = MaskRequest(3, guided, 0, np.array(known, np.int32))
        draft = maker.masks.draft(requested, propose, DraftLimits(choose.randrange(1, 12), 8))
        ids = tuple(draft.token_ids)
        forced = guided.forced(0, requested.token_ids, ids)
        assert forced == tuple(draft.is_forced)
        wanted = MaskRequest(3, guided, 0, requested.token_ids, ids, forced)
        computed.clear()
        found = maker.masks.make(np.array([3], np.int32), [wanted]).words[0]
        assert len(computed) == len(ids) + 1 - sum(forced) - (END in ids)
        for i, words in enumerate(found[: len(found) - (END in ids)]):
            assert allowed_ids(words) == allowed_after(grammar, known + list(ids[:i]))
        num_drafted, num_forced = num_drafted + len(ids), num_forced + sum(forced)
        known += ids[: choose.randrange(len(ids) + 1)]
        known.append(choose.choice(allowed_after(grammar, known)))
    assert num_drafted > num_forced > 5


class WildDrafter(StandIn):
    """Drafts the next tokens of a sequence, even after its end token. Some are wrong, some are
    forbidden by the grammar."""

    def __init__(self, right: float) -> None:
        self._right, self._choose = right, random.Random(2)
        self.num_tried = self.num_right = 0

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            known = context = sequence.known_tokens.tolist()
            matcher = None
            if grammar := sequence.request.grammar:
                matcher = LLMatcher(vocabulary().tokens, grammar)
                matcher.consume_tokens(known[sequence.num_prompt_tokens :])
            for _ in range(self._choose.randrange(1, 6)):
                words = None if matcher is None else matcher.compute_bitmask()
                allowed = None if words is None else allowed_ids(np.frombuffer(words, np.int32)[:2])
                token = next_token(context, allowed or None)
                if self._choose.random() >= self._right:
                    token = self._choose.randrange(VOCAB)
                context = [*context, token]
                if matcher is not None:
                    matcher.consume_token(token)
            draft_ids, name = context[len(known) :], sequence.request.request_id
            drafts.append(Draft(name, sequence.index, len(known), draft_ids))
        return drafts


@pytest.mark.parametrize(("right", "is_threaded"), in_turn([0.5, 0.9, 1.0], [False, True]))
def test_outputs_with_drafts_follow_their_grammars(is_threaded: bool, right: float) -> None:
    bench = GuidedBench(1, is_threaded)
    drafter = WildDrafter(right)
    draft_with(bench.core, drafter)
    for i, grammar in enumerate([JSON, WORDS, "", JSON, BUDGET, WORDS, ENDS, BUDGET]):
        bench.add(str(i), grammar, 5 + i, max_tokens=25)
    bench.add("three", NUMBERS, n=3, max_tokens=12)
    bench.add("beams", WORDS, n=3, max_tokens=12, use_beam_search=True)
    bench.finish()
    bench.assert_exact()
    assert drafter.num_tried > 20
    bench.core.close()


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_preempted_or_failed_requests_with_drafts_change_no_output(mode: dict[str, Any]) -> None:
    bench = GuidedBench(num_blocks=14, **mode)
    draft_with(bench.core, WildDrafter(0.8))
    for i, grammar in enumerate([WORDS, NUMBERS, WORDS, "", NUMBERS]):
        bench.add(str(i), grammar, 9, max_tokens=20)
    bench.add("two", WORDS, 9, n=2, max_tokens=15)
    bench.device.curses[1] = Curse(16, raises=True)
    bench.finish()
    assert reason_of(bench.ends["1", 0]) == "error"
    assert 9 + len(bench.tokens["1", 0]) > 16, "a draft token made it fail too early"
    del bench.requests["1"]
    bench.assert_exact()


def test_grammar_limit_in_a_draft_ends_no_request_early(monkeypatch: Any) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_LEXER_STATES", 40)
    found = []
    for draft_ids in (None, WildDrafter(1.0)):
        bench = GuidedBench()
        if draft_ids is not None:
            draft_with(bench.core, draft_ids)
        bench.add("long", lark("/[a-d]{60}/"), max_tokens=30)
        bench.finish()
        assert reason_of(bench.ends["long", 0]) == "error"
        assert "too many states" in error_of(bench.ends["long", 0])
        found.append(bench.tokens["long", 0])
    assert found[0] == found[1]


def test_replay_needs_neither_llguidance_nor_the_drafter(tmp_path: Path, monkeypatch: Any) -> None:
    bench, drafter = GuidedBench(), WildDrafter(0.9)
    draft_with(bench.core, drafter)
    bench.core.attach(Recorder(bench.scheduler, tmp_path, 1 << 20, True))
    for i, grammar in enumerate([JSON, WORDS, "", NUMBERS]):
        bench.add(str(i), grammar, 5 + i, max_tokens=15)
    bench.finish()
    bench.core.close()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    outcome = replay_all(read_recording(tmp_path))
    assert outcome.difference is None and outcome.num_steps > 2
    assert drafter.num_tried > 0

"""A matcher that runs ahead of its sequence drafts forced tokens and proposed tokens."""

from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher

from quire.engine.grammars.matchers import (
    NO_DRAFT,
    DraftLimits,
    Follower,
    Guided,
    GuidedDraft,
    guided_draft,
)
from tests.support.engine.guided_engine import END, lark, vocabulary
from tests.support.scheduler.fake_device import make_request

LIMITS = DraftLimits(32, 32)
GRAMMAR = lark('"ab" /[0-9]/ "true" /[0-9]/')


def ids_of(text: str) -> list[int]:
    return vocabulary().tokens.tokenize_str(text)


def follower() -> Follower:
    return Follower(LLMatcher(vocabulary().tokens, GRAMMAR))


def text_of(draft: GuidedDraft) -> str:
    return vocabulary().tokens.decode_str(draft.token_ids)


def test_draft_alternates_forced_and_proposed_tokens() -> None:
    seen = list[Sequence[int]]()

    def propose(ahead: Sequence[int]) -> list[int]:
        seen.append(list(ahead))
        return ids_of("7")

    draft = guided_draft(follower(), propose, LIMITS, [END])
    assert text_of(draft) == "ab7true7"
    is_digit = [each in ids_of("7") for each in draft.token_ids]
    assert draft.is_forced == [not each for each in is_digit]
    assert seen[:2] == [ids_of("ab"), [*ids_of("ab"), *ids_of("7"), *ids_of("true")]]


def test_proposal_is_reused_while_forced_tokens_agree() -> None:
    calls = list[int]()
    ahead = ids_of("7") + ids_of("true") + ids_of("8")

    def propose(_: Sequence[int]) -> list[int]:
        calls.append(1)
        return ahead

    assert text_of(guided_draft(follower(), propose, LIMITS, [END])).startswith("ab7true8")
    assert len(calls) <= 2, "only the end of the proposal may need a second call"


@pytest.mark.parametrize("num", range(8))
def test_draft_length_is_limited(num: int) -> None:
    draft = guided_draft(follower(), lambda _: ids_of("7"), DraftLimits(num, num), [END])
    assert len(draft.token_ids) == len(draft.is_forced) <= num


def test_forced_tokens_do_not_count_as_proposed() -> None:
    draft = guided_draft(follower(), lambda _: ids_of("7"), DraftLimits(32, 1), [END])
    assert text_of(draft) == "ab7true"


def test_forbidden_or_end_token_ends_the_draft() -> None:
    assert text_of(guided_draft(follower(), lambda _: ids_of("c"), LIMITS, [END])) == "ab"
    proposals = {2: ids_of("7")}

    def propose(ahead: Sequence[int]) -> list[int]:
        return proposals.get(len(ahead), [END])

    made = follower()
    known = ids_of("ab") + ids_of("7") + ids_of("true") + ids_of("8")
    made.go_to(np.array(known, np.int32))
    assert guided_draft(made, propose, LIMITS, [END]) == ([END], [False])


def test_matcher_rolls_back_after_a_draft() -> None:
    made, known = follower(), np.array(ids_of("ab"), np.int32)
    made.go_to(known)
    first = guided_draft(made, lambda _: ids_of("7"), LIMITS, [END])
    made.go_to(known)
    assert guided_draft(made, lambda _: ids_of("7"), LIMITS, [END]) == first
    assert not made.matcher.is_error()


def test_forced_flags_are_valid_only_for_the_drafted_tokens() -> None:
    guided, known = Guided(make_request("0", [1])), np.array([1, 2], np.int32)
    assert guided.forced(0, known, (5,)) == ()
    guided.drafts[0] = known, GuidedDraft([5, 6], [True, False])
    assert guided.forced(0, known, (5,)) == (True,)
    assert guided.forced(0, known, (5, 6)) == (True, False)
    assert guided.forced(0, np.array([1, 3], np.int32), (5,)) == ()
    assert guided.forced(0, known, (6,)) == ()
    assert guided.forced(1, known, (5,)) == ()
    guided.drafts[0] = known, NO_DRAFT
    assert guided.forced(0, known, ()) == ()

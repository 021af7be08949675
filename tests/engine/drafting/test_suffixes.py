"""Draft tokens that most often followed the same suffix, compared with a full search."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.base.settings.speculation import Suffixes
from quire.engine.drafting import ngram_index as places
from quire.engine.drafting.ngram_index import LONG, SHORT, RunIndex
from quire.engine.drafting.suffixes import BULK, OWN_TOKENS, PIECE, Answers, SuffixDrafter

TEXTS = st.lists(st.integers(0, 2), max_size=40)
ALL = Suffixes(depth=10_000, factor=100.0, min_probability=0.0)
ALONE = Suffixes(depth=10_000, num_answers=0, factor=1.0, min_probability=0.3)


@pytest.fixture(scope="module", autouse=True)
def every_place() -> Iterator[None]:
    """The search below looks at every place, so the drafter must do so, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "MAX_PLACES", 10_000)
        yield


def drafter(
    prompt: list[int], answers: Answers, limits: Suffixes = ALL, tenant: str = "", salt: str = ""
) -> SuffixDrafter:
    made = SuffixDrafter(limits, len(prompt), answers, answers.writer(tenant, salt))
    made.extend(prompt)
    return made


@settings(max_examples=60, deadline=None)
@given(prompt=TEXTS, sizes=st.lists(st.integers(1, 3 * PIECE), max_size=5), seed=st.integers(0, 9))
def test_bulk_and_single_tokens_build_the_same_index(
    prompt: list[int], sizes: list[int], seed: int
) -> None:
    choose, indices = random.Random(seed), list[list[object]]()
    pieces = [[choose.randrange(50) for _ in range(size)] for size in sizes]
    for is_whole in (False, True):
        answers = Answers(3)
        pair = [drafter(prompt, answers), drafter(prompt, answers, tenant="other")]
        for number, piece in enumerate(pieces):
            for part in [piece] if is_whole else [[token_id] for token_id in piece]:
                pair[number % 2].extend(part)
        indices.append([*map(contents, [answers.places, *(each._own for each in pair)])])
        indices[-1] += [each.propose(4) for each in pair]
    assert indices[0] == indices[1]


def contents(index: RunIndex) -> list[object]:
    chains = [(each.newest, each.before) for each in (index._long, index._short)]
    return [index.tokens, *chains]


Continuation = tuple[int, list[int]]  # number of equal tokens before it; its tokens


def continuations(text: list[int], first: int, last: list[int]) -> list[Continuation]:
    """Return the text after each place from `first` on; before it, how many tokens match `last`."""
    found = []
    for place in range(max(first, LONG), len(text)):
        pairs = zip(reversed(text[:place]), reversed(last), strict=False)
        differ = [one != other for one, other in pairs]
        num_same = differ.index(True) if True in differ else len(differ)
        found.append((num_same, text[place:]))
    return found


def most_frequent(found: list[Continuation], num: int, limits: Suffixes) -> tuple[float, list[int]]:
    """Return the most frequent continuation after the longest match. The newest wins a tie."""
    longest = max((length for length, _ in found), default=0)
    if longest < SHORT:
        return 0.0, []
    alive = [tail for length, tail in reversed(found) if length == longest]
    drafts, chance, expected = list[int](), 1.0, 0.0
    while len(drafts) < min(num, max(1, int(limits.factor * longest))):
        nexts = [tail[len(drafts)] for tail in alive if len(tail) > len(drafts)]
        if not nexts:
            break
        best = max(nexts, key=nexts.count)  # the newest of equally frequent tokens
        chance *= nexts.count(best) / len(nexts)
        if chance < limits.min_probability:
            break
        drafts.append(best)
        expected += chance
        alive = [tail for tail in alive if tail[: len(drafts)] == drafts]
    return expected, drafts


def of_itself(text: list[int], num: int, limits: Suffixes) -> tuple[float, list[int]]:
    """Search a text for its own end. Continuations that reach the end repeat themselves."""
    if len(text) < LONG:
        return 0.0, []
    found = [(length, (tail * num)[:num]) for length, tail in continuations(text, 0, text)]
    return most_frequent(found, num, limits)


@settings(max_examples=80, deadline=None)
@given(prompt=TEXTS, pieces=st.lists(TEXTS, max_size=6), num=st.integers(1, 8))
@example(prompt=[0, 0, 1, 0, 1, 0, 0, 1, 0, 1], pieces=[[0]], num=2)  # its beginning occurs again
@example(prompt=[0, 0, 0, 2, 2, 2, 2, 0, 2, 2], pieces=[[2]], num=2)  # a part of its beginning
def test_drafts_from_own_tokens_equal_a_full_search(
    prompt: list[int], pieces: list[list[int]], num: int
) -> None:
    """Also while a match is followed, and in a prompt that is indexed in bulk."""
    prompt = prompt * (BULK // max(1, len(prompt)) + 1 if num % 2 else 1)
    made, text = drafter(prompt, Answers(1), ALONE), list(prompt)
    for piece in [[], *pieces]:
        made.extend(piece)
        text += piece
        assert made.propose(num) == of_itself(text, num, ALONE)[1], text


@settings(max_examples=80, deadline=None)
@given(
    others=st.lists(st.tuples(TEXTS, TEXTS), max_size=5), prompt=TEXTS, num=st.integers(1, 8),
    is_running=st.booleans(),
)  # fmt: skip
def test_drafts_from_other_answers_equal_a_full_search(
    others: list[tuple[list[int], list[int]]], prompt: list[int], num: int, is_running: bool
) -> None:
    """The draft with more expected tokens wins: from own tokens or from other answers."""
    answers, found = Answers(8), list[Continuation]()
    running = []
    for other, answer in others:
        made = drafter(other, answers)
        for token_id in answer:  # in steps, with drafts of its own
            made.extend([token_id])
            made.propose(num)
        running += [made] if is_running else []
        before = other[-LONG:]
        found += continuations(before + answer, len(before), prompt)
    own = of_itself(prompt, num, ALL)
    shared = most_frequent(found, num, ALL) if len(prompt) >= LONG else (0.0, [])
    assert drafter(prompt, answers).propose(num) == (own if own[0] >= shared[0] else shared)[1]


OWNERS = st.sampled_from([("", ""), ("ann", ""), ("bob", ""), ("ann", "s"), ("", "s")])
SMALL = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(OWNERS, st.booleans(), SMALL), max_size=60), data=st.data())
def test_drafts_never_leak_between_tenants_or_salts(
    turns: list[tuple[tuple[str, str], bool, list[int]]], data: st.DataObject
) -> None:
    """All owners share a prompt, then each adds its secret. There is so little room that pieces
    change their owner while a drafter follows a match in them."""
    answers = Answers(data.draw(st.integers(1, 3)))
    prompt, names = [0, 1, 2, 3, 0, 1, 2, 3], dict[tuple[str, str], int]()
    running: dict[tuple[str, str], SuffixDrafter] = {}
    for (tenant, salt), is_new, tokens in turns:
        owner = tenant, salt
        secret = 100 * (1 + names.setdefault(owner, len(names)))
        if is_new or owner not in running:
            running[owner] = drafter([secret + 50, *prompt], answers, tenant=tenant, salt=salt)
        made = running[owner]
        made.extend([token_id + secret * (token_id == 3) for token_id in tokens])
        for each, one in running.items():
            own = 100 * (1 + names[each])
            assert all(t < 4 or t == own + 3 for t in one.propose(8)), "a secret of another owner"


def test_answers_are_shared_only_within_tenant_and_salt() -> None:
    answers, prompt = Answers(8), [1, 2, 3, 4, 5, 6]
    drafter(prompt, answers, tenant="ann", salt="s").extend([7, 8, 9])
    seen = drafter(prompt, answers, tenant="ann", salt="s").propose(4)
    assert seen == [7, 8, 9]
    for tenant, salt in [("", ""), ("ann", ""), ("", "s"), ("bob", "s"), ("ann", "t")]:
        assert drafter(prompt, answers, tenant=tenant, salt=salt).propose(4) == []
    off = Suffixes(num_answers=0)
    assert drafter(prompt, answers, off, tenant="ann", salt="s").propose(4) == []


def test_prompts_are_not_shared() -> None:
    answers, prompt = Answers(8), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    drafter(prompt, answers).extend([11])
    assert drafter(prompt[:8], answers).propose(4) == []
    assert drafter(prompt, answers).propose(4) == [11]


def test_oldest_answers_are_evicted() -> None:
    answers = Answers(4)
    for i in range(20):
        drafter([10 * i + j for j in range(6)], answers).extend([1000 + i] * 9)
    assert len(answers.places.tokens) == 4 * PIECE
    seen = [drafter([10 * i + j for j in range(6)], answers).propose(2) for i in range(20)]
    assert seen == [[]] * 16 + [[1000 + i] * 2 for i in range(16, 20)]


def test_answer_of_several_pieces_is_found_everywhere() -> None:
    """Also across the boundaries of its pieces."""
    answers = Answers(8)
    text = list(range(10_000, 10_000 + 3 * PIECE))
    drafter(text[:6], answers).extend(text[6:])
    for end in range(6, len(text) - 1):
        assert drafter(text[end - 6 : end], answers).propose(1) == [text[end]]


def test_only_the_newest_tokens_of_a_long_prompt_are_indexed() -> None:
    old, new = [1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17]
    filler = list(range(100, 100 + OWN_TOKENS))
    prompt = old + filler[: OWN_TOKENS // 2] + new + filler[OWN_TOKENS // 2 :]
    assert drafter(prompt + new[:6], Answers(1)).propose(1) == [17]
    assert drafter(prompt + old[:6], Answers(1)).propose(1) == []


@settings(max_examples=60, deadline=None)
@given(
    others=st.lists(st.tuples(TEXTS, TEXTS), max_size=4), prompt=TEXTS,
    ahead=st.lists(st.integers(0, 2), min_size=1, max_size=6), num=st.integers(1, 8),
)  # fmt: skip
def test_drafts_after_drafts_equal_a_full_search(
    others: list[tuple[list[int], list[int]]], prompt: list[int], ahead: list[int], num: int
) -> None:
    """A draft stops at the end of the sequence's own text: later tokens are not known."""
    answers, found = Answers(8), list[Continuation]()
    for other, answer in others:
        drafter(other, answers).extend(answer)
        before = other[-LONG:]
        found += continuations(before + answer, len(before), prompt + ahead)
    made = drafter(prompt, answers)
    first = made.propose(num)
    after = made.propose(num, ahead)
    if len(prompt) < LONG:
        assert after == []
        return
    own = most_frequent(continuations(prompt, 0, prompt + ahead), num, ALL)
    shared = most_frequent(found, num, ALL)
    assert after == (own if own[0] >= shared[0] else shared)[1]
    assert made.propose(num) == first, "the match of its own end is unchanged"

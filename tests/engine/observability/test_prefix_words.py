"""Reports of a prompt's prefix hit for operators and clients."""

import pytest

from quire.base.events import Admitted, PrefixFound, Queued
from quire.base.prefix import PrefixReport
from quire.engine.observability.prefix_words import as_data, in_words, shown_to
from quire.engine.observability.timeline import Timelines

APART = {"miss": "diverged", "at_token": 40, "near_id": "cmpl-1"}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (PrefixReport(), "no prefix hit"),
        (PrefixReport(miss="new"), "no prefix hit; the rest matches no known prompt"),
        (
            PrefixReport(device=96),
            "prefix hit 96 % (96 tokens on the device): all whole blocks of the prompt",
        ),
        (
            PrefixReport(device=16, host=16, store=8, **APART),
            "prefix hit 40 % (16 tokens on the device, 16 tokens from host memory, 8 tokens from a"
            " store); it differs from that of request cmpl-1 at token 40",
        ),
        (
            PrefixReport(pinned=20, miss="new", at_token=20, near_id="p"),
            "prefix hit 20 % (20 tokens pinned); from token 20 on it is new, where that of request"
            " p ends",
        ),
        (
            PrefixReport(miss="evicted", near_id="a", lost_s=2.51),
            "no prefix hit; the next block was cached, but was evicted 2.5 s before",
        ),
        (
            PrefixReport(miss="evicted", near_id="a"),
            "no prefix hit; the next block was cached, but was evicted",
        ),
        (
            PrefixReport(miss="salt", num_other_tokens=1600),
            "no prefix hit; another cache salt has 1,600 tokens of it",
        ),
        (
            PrefixReport(miss="computing", near_id="a"),
            "no prefix hit; the next block was just being computed for that of request a",
        ),
        (PrefixReport(miss="off"), "no prefix hit; there is no prefix cache"),
    ],
)
def test_report_is_described_in_words(report: PrefixReport, words: str) -> None:
    assert in_words(report, 100) == words


def test_reports_hide_the_requests_of_other_tenants() -> None:
    """Clients learn nothing about other tenants' requests, and no ids of their own. Clients without
    a key learn about no other request."""
    foreign = PrefixReport(device=32, **APART)
    own = PrefixReport(device=32, near_is_own=True, **APART)
    tiers = {"cached_tokens_by_tier": {"device": 32}}
    assert as_data(foreign, hides_others=True) == tiers == shown_to(foreign, "key 1")
    assert shown_to(own, "") == tiers
    mine = tiers | {"cache_miss": {"reason": "diverged", "at_token": 40}}
    assert shown_to(own, "key 1") == mine == as_data(own, hides_others=True)
    assert as_data(foreign)["cache_miss"]["nearest_request"] == "cmpl-1"
    assert in_words(foreign, 100, hides_others=True) == "prefix hit 32 % (32 tokens on the device)"
    assert in_words(own, 100, hides_others=True).endswith(
        "differs from another of your requests at token 40"
    )
    salted = PrefixReport(miss="salt", num_other_tokens=64)
    assert shown_to(salted, "key 1") == {"cached_tokens_by_tier": {}}
    assert "salt" not in in_words(salted, 100, hides_others=True)
    both = PrefixReport(num_other_tokens=64, near_is_own=True, **APART)
    assert in_words(both, 100) == "no prefix hit; another cache salt has 64 tokens of it"
    assert as_data(both)["cache_miss"]["tokens_of_another_salt"] == 64
    assert shown_to(both, "key 1")["cache_miss"] == mine["cache_miss"]
    assert "salt" not in in_words(both, 100, hides_others=True)
    unread = PrefixReport(miss="unread")
    assert shown_to(unread, "")["cache_miss"] == {"reason": "unread"}


def test_timelines_include_the_prefix_report() -> None:
    lines = Timelines(4, 4)
    report = PrefixReport(device=8, near_is_own=True, lost_s=1.0, miss="evicted", near_id="other")
    lines(Queued(0.0, "mine", 30, tenant="t"))
    lines(Admitted(0.1, "mine", 0, 8))
    lines(PrefixFound(0.1, "mine", report))
    lines(PrefixFound(0.1, "nobody", report))
    text = lines.text("mine", "t")
    assert '"cached_tokens":8,"cached_tokens_by_tier":{"device":8}' in text
    assert '"cache_miss":{"reason":"evicted","evicted_s_ago":1.0}' in text
    assert "prefix hit 27 % (8 tokens on the device); the next block was cached" in text
    assert "other" not in text.replace("others", "")

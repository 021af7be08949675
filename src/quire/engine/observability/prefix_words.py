"""Descriptions of prefix hits and misses, as JSON data and as sentences.

The reason for a miss reveals other prompts up to the exact token. A client that sees it could
reconstruct them token by token. So a response contains the reason only if it concerns prompts of
the same named tenant. Only internal records show other requests' ids and hits under other salts.
"""

from typing import Any

from quire.base.prefix import (
    COMPUTING,
    COSTLY,
    EVICTED,
    NEW,
    OFF,
    UNREAD,
    PrefixReport,
)

TIERS = {
    "pinned": "pinned",
    "held": "held",
    "device": "on the device",
    "host": "from host memory",
    "store": "from a store",
}
OWN_REASONS = (OFF, UNREAD)  # reasons that do not depend on other prompts


def shown_to(report: PrefixReport, tenant: str) -> dict[str, Any]:
    """Return the part of a report that a response to this tenant may contain. Clients without a
    name share the empty tenant, so they do not see reasons that concern other prompts."""
    data = as_data(report, hides_others=True)
    if not tenant and report.miss not in OWN_REASONS:
        data.pop("cache_miss", None)
    return data


def as_data(report: PrefixReport, hides_others: bool = False) -> dict[str, Any]:
    """Return a report as JSON data. hides_others: omit information about other tenants and the ids
    of other requests."""
    tiers = {tier: num for tier in TIERS if (num := getattr(report, tier)) > 0}
    data: dict[str, Any] = {"cached_tokens_by_tier": tiers}
    if not report.miss or (hides_others and _concerns_others(report)):
        return data
    miss: dict[str, Any] = {"reason": report.miss}
    if report.at_token >= 0:
        miss["at_token"] = report.at_token
    if report.lost_s >= 0:
        miss["evicted_s_ago"] = round(report.lost_s, 3)
    if report.num_other_tokens and not hides_others:
        miss["tokens_of_another_salt"] = report.num_other_tokens
    if report.near_id and not hides_others:
        miss["nearest_request"] = report.near_id
    return data | {"cache_miss": miss}


def _concerns_others(report: PrefixReport) -> bool:
    return report.miss not in OWN_REASONS and not report.near_is_own


def in_words(report: PrefixReport, num_prompt: int, hides_others: bool = False) -> str:
    """Describe a report in one sentence. num_prompt: tokens of the prompt."""
    num = report.num_tokens
    description = "no prefix hit"
    if num:
        where = ", ".join(
            f"{tokens:,} tokens {words}"
            for tier, words in TIERS.items()
            if (tokens := getattr(report, tier)) > 0
        )
        description = f"prefix hit {100 * num / num_prompt:.0f} % ({where})"
    if not report.miss:
        return f"{description}: all whole blocks of the prompt" if num else description
    hides_reason = hides_others and _concerns_others(report)
    return description if hides_reason else f"{description}; {_why(report, hides_others)}"


def _why(report: PrefixReport, hides_others: bool) -> str:
    if report.num_other_tokens and not hides_others:
        return f"another cache salt has {report.num_other_tokens:,} tokens of it"
    near = "another of your requests" if hides_others else f"that of request {report.near_id}"
    description = {
        OFF: "there is no prefix cache",
        UNREAD: "prompt_logprobs need the whole prompt computed",
        COSTLY: "more is in host memory, but loading it would have taken longer than computing it",
        COMPUTING: f"the next block was just being computed for {near}",
    }
    if report.miss in description:
        return description[report.miss]
    if report.miss == EVICTED:
        when = f" {report.lost_s:.1f} s before" if report.lost_s >= 0 else ""
        return f"the next block was cached, but was evicted{when}"
    if report.miss == NEW:
        at = f"from token {report.at_token:,} on it is new, where {near} ends"
        return at if report.near_id else "the rest matches no known prompt"
    return f"it differs from {near} at token {report.at_token:,}"

"""Draft tokens of a server and their acceptance, from its `/metrics` before and after a run.

The counters have vLLM's names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quire.tools.http_client import HttpClient, HttpError

TIMEOUT_S = 10.0
NAME = ":spec_decode_num_"  # follows the server's own prefix


@dataclass(frozen=True)
class DraftCounts:
    """Counts of draft tokens, since the server's start or for one run."""

    num_drafts: float = 0  # drafts: one for each row and step with draft tokens
    num_tokens: float = 0  # draft tokens
    num_accepted: float = 0  # accepted draft tokens
    # by index in the draft: how often that draft token was accepted
    accepted_at: Mapping[int, float] = field(default_factory=dict)

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Return the counts since an earlier count."""
        places = {i: n - before.accepted_at.get(i, 0) for i, n in self.accepted_at.items()}
        return DraftCounts(
            self.num_drafts - before.num_drafts,
            self.num_tokens - before.num_tokens,
            self.num_accepted - before.num_accepted,
            {place: num for place, num in sorted(places.items()) if num},
        )

    @property
    def acceptance_rate(self) -> float:
        """The accepted draft tokens in percent."""
        return 100 * self.num_accepted / self.num_tokens if self.num_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """The mean number of tokens that a row got in a step with draft tokens."""
        return 1 + self.num_accepted / self.num_drafts

    @property
    def rates_at(self) -> list[float]:
        """The acceptance rate of each index in the draft."""
        last = max(self.accepted_at, default=-1)
        return [self.accepted_at.get(i, 0) / self.num_drafts for i in range(last + 1)]


async def read_draft_counts(client: HttpClient) -> DraftCounts:
    """Read a server's counts; all zero if it has no such counters."""
    try:
        return parse_draft_counts((await client.request("/metrics", timeout_s=TIMEOUT_S)).text)
    except (HttpError, ValueError):
        return DraftCounts()


def parse_draft_counts(text: str) -> DraftCounts:
    """Return the counts, summed over all engines. Raises ValueError for another format."""
    counts: dict[str, float] = {}
    accepted_at: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _, is_there, name = sample.name.partition(NAME)
            if not is_there:
                continue
            if name == "accepted_tokens_per_pos_total":
                place = int(sample.labels["position"])
                accepted_at[place] = accepted_at.get(place, 0) + sample.value
            else:
                counts[name] = counts.get(name, 0) + sample.value
    return DraftCounts(
        counts.get("drafts_total", 0),
        counts.get("draft_tokens_total", 0),
        counts.get("accepted_tokens_total", 0),
        accepted_at,
    )


def block_lines(drafts: DraftCounts) -> list[str]:
    """Return vLLM's lines on speculative decoding; none if there were no draft tokens."""
    if not drafts.num_drafts:
        return []
    lines = [f"{'Speculative Decoding':-^50}"]
    for name, value in (
        ("Acceptance rate (%):", f"{drafts.acceptance_rate:.2f}"),
        ("Acceptance length:", f"{drafts.acceptance_length:.2f}"),
        ("Drafts:", f"{drafts.num_drafts:.0f}"),
        ("Draft tokens:", f"{drafts.num_tokens:.0f}"),
        ("Accepted tokens:", f"{drafts.num_accepted:.0f}"),
    ):
        lines.append(f"{name:<40} {value:<10}")
    if rates := drafts.rates_at:
        lines.append("Per-position acceptance (%):")
        for place, rate in enumerate(rates):
            lines.append(f"{f'  Position {place}:':<40} {f'{100 * rate:.2f}':<10}")
    return lines


def json_keys(drafts: DraftCounts) -> dict[str, Any]:
    """Return the counts under the keys of vLLM's result files; none without draft tokens."""
    if not drafts.num_drafts:
        return {}
    return {
        "spec_decode_acceptance_rate": drafts.acceptance_rate,
        "spec_decode_acceptance_length": drafts.acceptance_length,
        "spec_decode_num_drafts": int(drafts.num_drafts),
        "spec_decode_draft_tokens": int(drafts.num_tokens),
        "spec_decode_accepted_tokens": int(drafts.num_accepted),
        "spec_decode_per_position_acceptance_rates": drafts.rates_at,
    }

"""docs/results/clients.md has a row for each client, and no failed case."""

import re

from tests.clients.environments import CLIENTS
from tests.clients.page import PAGE, Row, page, rows_of

COUNTS = re.compile(r"\| (\d+) \| (\d+) \|")


def test_each_client_has_a_row_and_passes() -> None:
    rows = rows_of(PAGE.read_text("utf-8"))
    assert set(rows) == set(CLIENTS), 'run `make test-clients ARGS="--write"`'
    for client, row in rows.items():
        found = COUNTS.search(row)
        assert found is not None, row
        total, passed = map(int, found.groups())
        assert total > 0 and passed == total, client


def test_run_replaces_only_the_rows_of_its_clients() -> None:
    before = PAGE.read_text("utf-8")
    first, second = CLIENTS[:2]
    after = page(before, [Row(first, "9.9", 3, 2, ("a|b fails", "not tried: c\n\n  d"))])
    rows = rows_of(after)
    assert rows[first].endswith("| 9.9 | 3 | 2 | a\\|b fails; not tried: c d |")
    assert rows[second] == rows_of(before)[second]
    assert page(after, []) == after

"""An input file by its lines: their contents and errors, and the order in which they run."""

import random
from array import array
from pathlib import Path

import pytest

from quire.base.errors import RequestError
from quire.serve.batches.lines import LineError, id_of
from tests.support.serve.batch_files import index_of, request, write

URLS = ("/v1/completions", "/v1/chat/completions")


def test_lines_are_found_with_their_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a"), "", "  ", request("b"), "no json"])
    path.write_text(path.read_text().removesuffix("\n"))  # the last line may lack a newline
    index = index_of(path)
    assert len(index) == 3
    lines = path.read_bytes().splitlines()
    for position, number in enumerate((1, 4, 5)):
        data, found = index.data(position)
        assert data.strip() == lines[number - 1]
        assert found == id_of(lines[number - 1], number, "demo")
    assert index.parse(1, index.data(1)[0], URLS).custom_id == "b"
    [problem] = index.problems
    assert (problem.number, problem.error.code) == (5, "invalid_json_line")


def test_empty_file_has_no_lines(tmp_path: Path) -> None:
    index = index_of(write(tmp_path / "in", []))
    assert len(index) == 0 and index.order.tolist() == []
    assert index.positions_of(array("Q", [7])).tolist() == [-1]


def test_lines_with_a_shared_beginning_are_adjacent(tmp_path: Path) -> None:
    """By definition, no line is between two lines that share a longer beginning than both share
    with it. Beginnings are cut at powers of two."""
    rng = random.Random(5)
    systems = ["".join(rng.choices("ab ", k=length)) for length in (64, 200, 700, 3000)]
    prompts = []
    for number in range(60):
        system = rng.choice(systems)
        prompts.append(system[: rng.choice((40, len(system)))] + f" question {number}")
    path = write(tmp_path / "in", [request(str(i), text) for i, text in enumerate(prompts)])
    order = index_of(path).order.tolist()
    assert sorted(order) == list(range(60))

    def common(a: str, b: str) -> int:
        """Return the longest cut up to which both are equal."""
        return max((64 << i for i in range(11) if a[: 64 << i] == b[: 64 << i]), default=0)

    for x in range(60):
        for y in range(x + 2, 60):
            first, last = prompts[order[x]], prompts[order[y]]
            between = [prompts[order[z]] for z in range(x + 1, y)]
            assert all(common(first, middle) >= common(first, last) for middle in between)


def test_lines_with_nothing_in_common_keep_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request(str(i), f"{i} bottles of rum") for i in range(50)])
    assert index_of(path).order.tolist() == list(range(50))


def test_lines_are_grouped_by_endpoint(tmp_path: Path) -> None:
    urls = ["/v1/completions", "/tokenize"]
    path = write(tmp_path / "in", [request(str(i), "Same", urls[i % 2]) for i in range(6)])
    assert index_of(path).order.tolist() == [0, 2, 4, 1, 3, 5]


def test_duplicate_custom_id_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a"), request("b"), request("a", "other"), "x", "x"])
    index = index_of(path, urls=URLS)
    assert index.num_problems == 3
    assert [(p.number, p.error.code) for p in index.problems] == [
        (4, "invalid_json_line"), (5, "invalid_json_line"), (3, "duplicate_custom_id"),
    ]  # fmt: skip
    index.parse(0, index.data(0)[0], URLS)
    with pytest.raises(LineError, match="earlier line"):
        index.parse(2, index.data(2)[0], URLS)


def test_overlong_line_is_not_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a", "x" * 5000), request("b"), request("c", "y" * 600)])
    index = index_of(path, max_line_bytes=500)
    assert [len(index.data(position)[0]) for position in (0, 2)] == [501, 501]
    assert index.size(1) < 500
    assert [p.error.code for p in index.problems] == ["line_too_long"] * 2
    assert index.parse(1, index.data(1)[0], URLS).custom_id == "b"


def test_too_many_lines_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request(str(i)) for i in range(4)])
    assert len(index_of(path, max_lines=4)) == 4
    with pytest.raises(RequestError, match="more than 3 lines"):
        index_of(path, max_lines=3)


def test_changed_file_is_detected(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a"), request("b")])
    index = index_of(path)
    write(path, [request("a"), request("c")])
    index.data(0)
    with pytest.raises(RequestError, match="line 2 .* has changed"):
        index.data(1)


def test_lines_are_found_by_their_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request(str(i)) for i in range(30)])
    index = index_of(path)
    halves = [int.from_bytes(index.data(position)[1][:8], "big") for position in range(30)]
    wanted = array("Q", [halves[7], 12345, halves[29], halves[0]])
    assert index.positions_of(wanted).tolist() == [7, -1, 29, 0]

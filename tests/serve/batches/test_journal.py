"""The output as its own journal: recovery after a kill, and files that are no journal."""

import errno
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from quire.base.errors import ConfigError, RequestError
from quire.serve.batches import journal as journal_module
from quire.serve.batches.input_index import InputIndex
from quire.serve.batches.journal import Journal
from quire.serve.batches.lines import Failure, OutputLine, Response, shown_id
from quire.serve.batches.tally import Tally
from tests.support.serve.batch_files import index_of, request, write

BODY = (
    b'{"usage":{"prompt_tokens":7,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)


@pytest.fixture
def index(tmp_path: Path) -> InputIndex:
    return index_of(write(tmp_path / "in", [request(name) for name in "abcd"]))


def answered(index: InputIndex, position: int, status: int = 200) -> OutputLine:
    response = Response(status, "req-1", msgspec.Raw(BODY))
    return OutputLine(shown_id(index.data(position)[1]), "a", response, None)


def failed(index: InputIndex, position: int) -> OutputLine:
    return OutputLine(shown_id(index.data(position)[1]), None, None, Failure("code", "why"))


def resumed(path: Path, index: InputIndex) -> set[int]:
    with closing(Journal(path)) as journal:
        return journal.resume(index, Tally())


def test_written_lines_count_as_done(tmp_path: Path, index: InputIndex) -> None:
    journal = Journal(tmp_path / "out")
    assert journal.resume(index, Tally()) == set()
    for line in (answered(index, 2), failed(index, 0), answered(index, 3, 400)):
        journal.append(line)
    journal.close()
    tally = Tally()
    again = Journal(tmp_path / "out")
    assert again.resume(index, tally) == {0, 2, 3}
    assert (tally.num_completed, tally.num_failed, tally.num_done) == (1, 2, 3)
    assert tally.usage()["total_tokens"] == 9
    assert tally.usage()["input_tokens_details"] == {"cached_tokens": 4}


def test_torn_line_of_any_length_is_cut(tmp_path: Path, index: InputIndex) -> None:
    path = tmp_path / "out"
    first, second = answered(index, 0).encode(), failed(index, 1).encode()
    for length in range(len(second)):
        path.write_bytes(first + second[:length])
        journal = Journal(path)
        assert journal.resume(index, Tally()) == {0}
        journal.append(answered(index, 2))
        journal.close()
        assert path.read_bytes() == first + answered(index, 2).encode()


@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\n", b"{}\n", b'{"id":"other"}\n', b"\0"]
)
def test_other_files_are_rejected_and_left_unchanged(
    tmp_path: Path, index: InputIndex, content: bytes
) -> None:
    path = tmp_path / "out"
    for before in (b"", answered(index, 0).encode()):
        path.write_bytes(before + content)
        with pytest.raises(RequestError, match="is not a batch output file"):
            resumed(path, index)
        assert path.read_bytes() == before + content


def test_answers_of_another_input_or_model_are_rejected(tmp_path: Path, index: InputIndex) -> None:
    path = tmp_path / "out"
    path.write_bytes(answered(index, 0).encode() + answered(index, 1).encode())
    before = path.read_bytes()
    changed = index_of(write(tmp_path / "in2", [request("a"), request("b", "other")]))
    for other, line in ((changed, 2), (index_of(index.path, "another model"), 1)):
        with pytest.raises(RequestError, match=f"line {line} of .* answers no line of"):
            resumed(path, other)
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
        {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
        {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 4},
    ],
)
def test_usage_is_counted_in_every_endpoints_format(usage: dict[str, object]) -> None:
    body = msgspec.Raw(msgspec.json.encode({"usage": usage}))
    tally = Tally()
    tally.add(OutputLine("", "a", Response(200, "r", body), None))
    assert (tally.num_prompt_tokens, tally.num_cached_tokens, tally.num_output_tokens) == (9, 4, 3)


def test_input_may_grow_between_runs(tmp_path: Path, index: InputIndex) -> None:
    path = tmp_path / "out"
    path.write_bytes(answered(index, 1).encode())
    longer = index_of(write(tmp_path / "in", [request(name) for name in "abcdefg"]))
    assert Journal(path).resume(longer, Tally()) == {1}


def test_only_one_process_may_write(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    with pytest.raises(ConfigError, match="written by another process"):
        Journal(tmp_path / "out")
    journal.close()
    Journal(tmp_path / "out").close()


def test_failed_lines_may_go_to_another_file(tmp_path: Path, index: InputIndex) -> None:
    journal = Journal(tmp_path / "out", tmp_path / "failed")
    for line in (answered(index, 0), failed(index, 1), answered(index, 2, 400)):
        journal.append(line)
    journal.close()
    assert (tmp_path / "out").read_bytes() == answered(index, 0).encode()
    assert (tmp_path / "failed").read_bytes().count(b"\n") == 2
    assert Journal(tmp_path / "out", tmp_path / "failed").resume(index, Tally()) == {0, 1, 2}


def test_partly_written_line_is_removed(
    tmp_path: Path, index: InputIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    journal = Journal(tmp_path / "out")
    journal.append(answered(index, 0))
    write_some = os.pwrite
    calls = []

    def full(fd: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write_some(fd, data[:9], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            journal.append(answered(index, 1))
    assert (tmp_path / "out").read_bytes() == answered(index, 0).encode()
    journal.append(answered(index, 2))
    assert (tmp_path / "out").read_bytes().count(b"\n") == 2


def test_failed_sync_is_retried(
    tmp_path: Path, index: InputIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` releases the files' locks even if the sync fails again."""
    journal, num_synced = Journal(tmp_path / "out", tmp_path / "failed"), 0

    def sync(fd: int) -> None:
        nonlocal num_synced
        num_synced += 1
        raise OSError(errno.EIO, "Input/output error")

    journal.resume(index, Tally())
    journal.append(answered(index, 2))
    journal.append(failed(index, 0))
    with monkeypatch.context() as patched:
        patched.setattr(journal_module.os, "fsync", sync)
        for number in (1, 2):
            with pytest.raises(OSError, match="Input/output"):
                journal.sync()
            assert num_synced == number
        with pytest.raises(OSError, match="Input/output"):
            journal.close()
    again = Journal(tmp_path / "out", tmp_path / "failed")  # the locks are free
    assert again.resume(index, Tally()) == {0, 2}
    again.close()

"""The next engine over a directory restores retained requests: tokens, owner and expiry.

Damaged and expired files, and files of other servers or models, are not restored."""

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.clock import FakeClock
from quire.base.messages import Fork, PutBack, RetainedRequest
from quire.base.requests.media_items import MediaItem
from quire.engine.attachments.retained_files import RetainedFiles
from quire.engine.recording.files import read_recording
from quire.tools.replay import replay_all
from tests.engine.loop.test_sessions import Engine, needs_core

TOKENS = np.arange(5, 45, dtype=np.int32)
PRINT = b"\1\2"


def retained(name: str = "cmpl-a", index: int = 0, **more: Any) -> RetainedRequest:
    fields = {"keep_s": 60.0, "tenant": "", "cache_salt": "salt", "expires_in_s": 50.0} | more
    return RetainedRequest(name, index, 30, len(TOKENS), 0, **fields)


def opened(folder: Path, server: str = "one", fingerprint: bytes = PRINT) -> RetainedFiles:
    files = RetainedFiles.open(folder, fingerprint, server, FakeClock())
    assert files is not None
    return files


def write(folder: Path, *requests: RetainedRequest, server: str = "one") -> None:
    files = opened(folder, server)
    files.submit({(one.id, one.index): (one, TOKENS) for one in requests})
    files.close()


def loaded(folder: Path, **more: Any) -> list[PutBack]:
    files = opened(folder, **more)
    found = list(files.load())
    files.close()
    return found


def names(folder: Path, **more: Any) -> list[str]:
    return [message.request_id for message in loaded(folder, **more)]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.held"))


def test_written_requests_are_restored(tmp_path: Path) -> None:
    write(
        tmp_path,
        retained(),
        retained("cmpl-a", 1),
        retained("../b", tenant="user 1", adapter_id="x"),
    )
    found = {(each.request_id, each.index): each for each in loaded(tmp_path)}
    assert sorted(found) == [("../b", 0), ("cmpl-a", 0), ("cmpl-a", 1)]
    one = found["../b", 0]
    assert one.token_ids == TOKENS.tolist() and one.num_prompt_tokens == 30
    assert (one.tenant, one.cache_salt, one.keep_s) == ("user 1", "salt", 60.0)
    assert one.adapter_id == "x"
    assert 40 < one.left_s <= 50
    folders = {path.parent for path in files_in(tmp_path)}
    assert [folder.relative_to(tmp_path).parts for folder in folders] == [
        ("quire-held-1", PRINT.hex(), "0")
    ]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files_in(tmp_path))
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)


def test_request_with_an_image_is_not_written(tmp_path: Path) -> None:
    picture = MediaItem(start=1, num_tokens=2, digest=b"p" * 32)
    write(tmp_path, retained(media=(picture,)), retained("cmpl-b"))
    assert names(tmp_path) == ["cmpl-b"]


def test_released_and_rewound_requests_update_their_files(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.submit({("cmpl-a", 0): (retained(), TOKENS), ("cmpl-b", 0): (retained("cmpl-b"), TOKENS)})
    files.submit({("cmpl-a", 0): None, ("cmpl-b", 0): (retained("cmpl-b"), TOKENS[:7])})
    files.close()
    [found] = loaded(tmp_path)
    assert (found.request_id, found.token_ids) == ("cmpl-b", TOKENS[:7].tolist())


def test_requests_with_a_number_as_id_are_not_written(tmp_path: Path) -> None:
    write(tmp_path, retained("17"))
    assert files_in(tmp_path) == []


def test_expiry_counts_the_time_between_two_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, retained("short", expires_in_s=10.0), retained("long", expires_in_s=50.0))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30.0)
    [found] = loaded(tmp_path)
    assert found.request_id == "long" and 19 < found.left_s <= 20.1
    assert len(files_in(tmp_path)) == 1, "the expired file is deleted"
    monkeypatch.setattr(time, "time", lambda: now - 1e6)  # the clock was set back
    assert loaded(tmp_path)[0].left_s == 60.0


def test_another_server_deletes_requests_of_api_keys(tmp_path: Path) -> None:
    requests = retained("cmpl-a", tenant="key 1"), retained("cmpl-b", tenant="user 77")
    write(tmp_path, *requests)
    assert sorted(names(tmp_path, server="one")) == ["cmpl-a", "cmpl-b"]
    assert names(tmp_path, server="two") == ["cmpl-b"]
    assert names(tmp_path, server="one") == ["cmpl-b"], "server two has deleted the file"


def test_other_fingerprint_restores_nothing(tmp_path: Path) -> None:
    write(tmp_path, retained())
    assert names(tmp_path, fingerprint=b"\3") == []
    assert names(tmp_path) == ["cmpl-a"]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "text"])
def test_damaged_files_are_skipped_and_deleted(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, retained(), retained("cmpl-b"))
    path = files_in(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"flip": data, "cut": data[:-9], "empty": b"", "text": b"x" * 99}[harm])
    logging.getLogger("quire").addHandler(caplog.handler)
    try:
        assert len(names(tmp_path)) == 1
    finally:
        logging.getLogger("quire").removeHandler(caplog.handler)
    assert "1 files of retained requests" in caplog.text and "damaged" in caplog.text
    assert len(files_in(tmp_path)) == 1


def test_concurrent_engines_use_separate_folders(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    one.submit({("cmpl-a", 0): (retained(), TOKENS)})
    other.submit({("cmpl-b", 0): (retained("cmpl-b"), TOKENS)})
    one.close()
    assert names(tmp_path) == ["cmpl-a"], "the other engine still locks its folder"
    other.close()
    assert {path.parent.name for path in files_in(tmp_path)} == {"0", "1"}


def test_folder_that_cannot_be_created_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "quire-held-1").write_text("in the way")
    logging.getLogger("quire").addHandler(caplog.handler)
    try:
        assert RetainedFiles.open(tmp_path, PRINT, "", FakeClock()) is None
    finally:
        logging.getLogger("quire").removeHandler(caplog.handler)
    assert "will not survive a restart" in caplog.text


@needs_core
def test_next_engine_restores_the_retained_requests(tmp_path: Path) -> None:
    """A fork of a restored request uses the directory's blocks and equals a new request. Released
    requests stay released and rewound requests stay rewound."""
    settings: dict[str, Any] = {"kv_disk_dir": str(tmp_path / "blocks"), "num_blocks": 40}
    one = Engine(**settings)
    first, second, third = (one.kept(seed=seed) for seed in range(3))
    tokens = first.token_ids
    one.client.rewind(second.id, 0, 9)
    one.client.keep(third.id, 0.0)
    one.close()
    record = tmp_path / "record"
    other = Engine(**settings, record=str(record), record_tokens=True)
    held = {each.id: each for each in other.client.held()}
    assert held.keys() == {first.id, second.id}
    assert all(each.num_blocks == 0 and 500 < each.expires_in_s <= 600 for each in held.values())
    assert other.held(second.id).token_ids == tokens[:9]
    assert other.held(first.id).token_ids == tokens
    other.num_asked = 100  # its requests have other names
    forked = other.ask(tokens[:30], Fork(first.id, 0, 30), max_tokens=8, seed=9, keep_s=600)
    [output] = other.finish(forked)
    assert output.num_cached_tokens == 16, "the directory had the full block"
    [expected] = other.tokens(tokens[:30], max_tokens=8, seed=9, skip_reading_prefix_cache=True)
    assert output.outputs[0].token_ids == expected
    other.client.keep(first.id, 0.0)
    other.close()
    outcome = replay_all(read_recording(record))
    assert outcome.difference is None and outcome.num_requests == 2
    last = Engine(**settings)
    assert {each.id for each in last.client.held()} == {second.id, forked.request_id}
    last.close()

"""Files and batches on a disk that is full, or with files that are damaged
(`serve/batches/directory.py`, `serve/batches/batches.py`)."""

import errno
import logging
from pathlib import Path

import pytest

from quire.base import files as durable
from quire.serve.batches import batches, file_store
from quire.serve.batches.batch_store import BatchStore
from quire.serve.batches.directory import FilesDirectory
from quire.serve.batches.file_store import FileStore
from tests.serve.api.conftest import MakeContext
from tests.support.processes.servers import wait_until
from tests.support.serve.batch_files import request
from tests.support.serve.batch_server import serving

DAMAGED = [b"", b'{"id":"file-', b"\xff\xfe", b"[" * 100_000, b'{"id": 3}']


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_record_affects_no_other_record(
    make_context: MakeContext,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damaged: bytes,
) -> None:
    with serving(make_context, tmp_path) as server:
        first, second = server.upload(b"{}\n"), server.upload(b"{}\n")
        done = server.begin([request("r0", "a fox")])
        server.wait_for(done["id"], "completed")
        lost = server.begin([request("r0", "a fox")])
        server.wait_for(lost["id"], "completed")
        for name in (first["id"], lost["id"]):
            (tmp_path / f"{name}.json").write_bytes(damaged)
        with caplog.at_level(logging.ERROR, "quire"):
            listed = {file["id"] for file in server.get("/v1/files")["data"]}
            assert [batch["id"] for batch in server.get("/v1/batches")["data"]] == [done["id"]]
        assert second["id"] in listed and first["id"] not in listed
        assert f"{first['id']}.json is damaged" in caplog.text
        assert f"{lost['id']}.json is damaged" in caplog.text
        server.get(f"/v1/files/{first['id']}", status=404)
        later = server.begin([request("r1", "a cow")])
        assert server.wait_for(later["id"], "completed", "failed")["status"] == "completed"


def test_temporarily_full_disk_ends_no_batch(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk writes the first bytes of a file. Lists still work, and the batch ends later."""
    monkeypatch.setattr(batches, "AGAIN_S", 0.0)
    with serving(make_context, tmp_path) as server:
        made = server.begin([request("r0", "a fox")])
        server.wait_for(made["id"], "completed")
        failures: list[int] = []

        def full(fd: int, data: memoryview) -> None:
            durable.os.write(fd, bytes(data)[:7])
            failures.append(fd)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            upload = server.upload(b'{"custom_id": "r1"}\n')
            patched.setattr(durable, "write_all", full)
            server.post("/v1/batches", 507, input_file_id=upload["id"], endpoint="/v1/completions")
            assert server.upload(b"{}", status=507)["error"]["code"] == "disk_full"
        assert len(failures) >= 2
        assert [batch["id"] for batch in server.get("/v1/batches")["data"]] == [made["id"]]

        with monkeypatch.context() as patched:
            failures.clear()
            later = server.begin([request("r2", "a cow")])
            patched.setattr(durable, "write_all", full)
            wait_until(lambda: len(failures) >= 2)
        assert server.wait_for(later["id"], "completed", "failed")["status"] in (
            "completed",
            "failed",
        )
        last = server.begin([request("r3", "the sea")])
        assert server.wait_for(last["id"], "completed", "failed")["status"] == "completed"


def test_runner_survives_unexpected_errors(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished, failures = BatchStore.unfinished, []

    def fails_twice(store: BatchStore) -> object:
        if len(failures) < 2:
            failures.append(store)
            raise ValueError("a mistake of ours")
        return unfinished(store)

    monkeypatch.setattr(BatchStore, "unfinished", fails_twice)
    with serving(make_context, tmp_path) as server:
        made = server.begin([request("r0", "a fox")])
        assert server.wait_for(made["id"], "completed", "failed")["status"] == "completed"
    assert len(failures) == 2


@pytest.mark.parametrize("when", ["before it is opened", "after"])
def test_file_deleted_while_it_is_sent_is_complete_or_missing(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with serving(make_context, tmp_path) as server:
        made = server.upload(b"0123456789" * 100_000)
        store = FileStore(server.kept.files.directory)
        get, open_path = file_store.FileStore.get, Path.open

        def found_and_deleted(self: FileStore, file_id: str, owner: str | None) -> object:
            record = get(self, file_id, owner)
            if when == "before it is opened":
                store._remove(file_id)
            return record

        def opened_and_deleted(path: Path, mode: str = "r", **given: int) -> object:
            file = open_path(path, mode, **given)
            if path.suffix == ".data":
                store._remove(made["id"])
            return file

        monkeypatch.setattr(file_store.FileStore, "get", found_and_deleted)
        monkeypatch.setattr(Path, "open", opened_and_deleted)
        answer = server.client.get(f"/v1/files/{made['id']}/content")
    if when == "after":
        assert answer.status_code == 200 and len(answer.content) == 1_000_000
    else:
        assert answer.status_code == 404 and "GET /v1/files lists them" in answer.text


def test_descriptor_shortage_is_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = FilesDirectory(tmp_path, 1.0)
    path = directory.path("some", ".json")
    directory.write(path, 7)

    def none_left(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            directory.read(path, int)
    assert directory.read(path, int) == 7 and "damaged" not in caplog.text


def test_range_of_a_file_can_be_requested(make_context: MakeContext, tmp_path: Path) -> None:
    with serving(make_context, tmp_path) as server:
        made = server.upload(b"0123456789")
        path = f"/v1/files/{made['id']}/content"
        part = server.client.get(path, headers={"Range": "bytes=3-5"})
        assert (part.status_code, part.content) == (206, b"345")
        assert part.headers["content-range"] == "bytes 3-5/10" and part.headers["etag"]
        assert server.client.get(path, headers={"Range": "bytes=99-"}).status_code == 416

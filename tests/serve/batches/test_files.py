"""/v1/files: contents, owners and limits of files, and the form of an upload
(`serve/batches/upload_form.py`, `serve/batches/files_routes.py`)."""

import os
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from quire.base.errors import ConfigError, RequestError
from quire.serve.app import create_app
from quire.serve.batches import directory, files_routes
from quire.serve.batches.directory import FilesDirectory
from quire.serve.batches.file_store import FileRecord, FileStore, Upload
from tests.serve.api.conftest import MakeContext
from tests.support.serve.batch_server import serving

BOUNDARY = "quire-boundary"


def form(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    """Return a form as a client writes it. parts: (head, content) of each."""
    begin = f"--{BOUNDARY}\r\nContent-Disposition: form-data; ".encode()
    body = b"".join(begin + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts)
    return body + f"--{BOUNDARY}".encode() + end


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="in.jsonl"', b"{}\n")


def test_file_is_stored_unchanged_and_listed(make_context: MakeContext, tmp_path: Path) -> None:
    content = os.urandom(3 << 20) + b"\r\n--quire-boundar\r\n--\r\n" * 9 + b"\r"
    with serving(make_context, tmp_path / "kept") as server:
        made = server.upload(content)
        assert made["id"].startswith("file-") and made["object"] == "file"
        assert (made["bytes"], made["purpose"]) == (len(content), "batch")
        assert made["filename"] == "in.jsonl" and made["expires_at"] is None
        assert server.get(f"/v1/files/{made['id']}") == made
        found = server.client.get(f"/v1/files/{made['id']}/content")
        assert found.content == content
        second = server.upload(b"{}")
        assert server.get("/v1/files")["data"] == [second, made]
        assert server.get("/v1/files?purpose=batch&order=asc&limit=1")["has_more"]
        assert server.get(f"/v1/files?after={second['id']}")["data"] == [made]
        assert server.get("/v1/files?purpose=other")["data"] == []
        assert server.delete(f"/v1/files/{made['id']}")["deleted"]
        server.delete(f"/v1/files/{made['id']}", status=404)
        assert server.get("/v1/files")["data"] == [second]
    left = {path.name for path in (tmp_path / "kept").iterdir()}
    assert left == {f"{second['id']}.json", f"{second['id']}.data", "room.lock"}
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ((FILE,), "purpose"),
        ((('name="purpose"', b"fine-tune"), FILE), "purpose"),
        ((PURPOSE,), "file"),
        ((PURPOSE, (FILE[0], b"")), "file"),
        ((PURPOSE, FILE, FILE), "file"),
        ((PURPOSE, PURPOSE, FILE), None),
        ((PURPOSE, ('name="more"', b"x" * 1025), FILE), "more"),
        ((PURPOSE, ('name="expires_after[seconds]"', b"7200"), FILE), "expires_after"),
        (
            (
                PURPOSE,
                ('name="expires_after[anchor]"', b"created_at"),
                ('name="expires_after[seconds]"', b"59"),
                FILE,
            ),
            "expires_after",
        ),
    ],
)
def test_invalid_form_is_rejected_with_its_field(
    make_context: MakeContext, tmp_path: Path, parts: tuple[tuple[str, bytes], ...], param: str
) -> None:
    with serving(make_context, tmp_path) as server:
        head = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        found = server.client.post("/v1/files", content=form(*parts), headers=head)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["param"] == param
    assert [path.name for path in tmp_path.iterdir()] == ["room.lock"]


def test_form_may_arrive_in_any_pieces(make_context: MakeContext, tmp_path: Path) -> None:
    content = b"\r\n--quire-boundary-\r\n\n--" * 3
    body = form(PURPOSE, (FILE[0], content))
    head = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    with serving(make_context, tmp_path) as server:
        for size in (1, 2, 7, 40):
            pieces = (body[at : at + size] for at in range(0, len(body), size))
            made = server.client.post("/v1/files", content=pieces, headers=head).json()
            assert server.client.get(f"/v1/files/{made['id']}/content").content == content


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{}", "application/json", 415),
        (b"{}", "multipart/form-data", 415),
        (b"nothing of a form", f"multipart/form-data; boundary={BOUNDARY}", 400),
        (form(PURPOSE, FILE, end=b""), f"multipart/form-data; boundary={BOUNDARY}", 400),
        (form(PURPOSE, FILE)[:-30], f"multipart/form-data; boundary={BOUNDARY}", 400),
        (b"", f"multipart/form-data; boundary={BOUNDARY}", 400),
    ],
)
def test_body_that_is_no_form_is_rejected(
    make_context: MakeContext, tmp_path: Path, body: bytes, kind: str, status: int
) -> None:
    with serving(make_context, tmp_path) as server:
        found = server.client.post("/v1/files", content=body, headers={"Content-Type": kind})
        assert found.status_code == status, found.text
    assert [path.name for path in tmp_path.iterdir()] == ["room.lock"]


def test_only_files_may_exceed_the_body_limit(make_context: MakeContext, tmp_path: Path) -> None:
    with serving(make_context, tmp_path, max_body_bytes=1024, files_gb=1e-4) as server:
        made = server.upload(b"x" * 60_000)
        refused = server.upload(b"y" * 60_000, status=413)
        assert refused["error"]["code"] == "no_room" and "files_gb" in refused["error"]["message"]
        server.upload(b"y" * 200_000, status=413)
        assert server.get("/v1/files")["data"] == [made]
        server.post("/v1/batches", status=413, input_file_id="x" * 2000, endpoint="/tokenize")
        server.delete(f"/v1/files/{made['id']}")
        server.upload(b"y" * 60_000)


def test_error_without_files_dir_names_the_flag(make_context: MakeContext) -> None:
    with TestClient(create_app(make_context())) as client:
        for method, path in (
            ("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/files/file-1"),
            ("DELETE", "/v1/files/file-1"), ("GET", "/v1/files/file-1/content"),
            ("GET", "/v1/batches"), ("GET", "/v1/batches/batch_1"),
            ("POST", "/v1/batches/batch_1/cancel"),
        ):  # fmt: skip
            found = client.request(method, path)
            assert found.status_code == 404 and "--files-dir" in found.json()["error"]["message"]
        body = {"input_file_id": "file-1", "endpoint": "/v1/completions"}
        assert client.post("/v1/batches", json=body).json()["error"]["code"] == "no_files_dir"


def test_key_sees_only_its_own_files(make_context: MakeContext, tmp_path: Path) -> None:
    with serving(make_context, tmp_path, api_key=("one", "two")) as server:
        mine = server.upload(b"{}")
        server.key = "two"
        path = f"/v1/files/{mine['id']}"
        assert server.get("/v1/files")["data"] == []
        for ask in (server.get, server.delete):
            assert ask(path, status=404)["error"]["code"] == "not_found"
        server.get(f"{path}/content", status=404)
        server.post("/v1/batches", status=400, input_file_id=mine["id"], endpoint="/v1/completions")
        server.key = "none of them"
        server.get("/v1/files", status=401)
        server.upload(b"{}", status=401)
        server.key = "one"
        assert server.get(path) == mine
    assert b"one" not in b"".join(p.read_bytes() for p in tmp_path.glob("*.json"))


def test_file_ids_cannot_name_other_paths(make_context: MakeContext, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    with serving(make_context, tmp_path / "kept") as server:
        for name in ("..%2Fsecret", "%2e%2e", "file-..", "file-" + "g" * 32, "room.lock"):
            server.get(f"/v1/files/{name}", status=404)
            server.get(f"/v1/files/{name}/content", status=404)


def test_expired_file_is_deleted(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    with serving(make_context, tmp_path) as server:
        made = server.upload(b"{}", **expires)
        assert made["expires_at"] == made["created_at"] + 3600
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3601)
        assert server.get("/v1/files")["data"] == []
        server.get(f"/v1/files/{made['id']}", status=404)
    assert not list(tmp_path.glob("file-*"))


def test_number_of_files_is_limited(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.serve.batches import file_store

    monkeypatch.setattr(file_store, "MAX_FILES", 2)
    assert files_routes.MAX_FILES == 10_000
    with serving(make_context, tmp_path) as server:
        first = server.upload(b"{}")
        server.upload(b"{}")
        assert server.upload(b"{}", status=413)["error"]["code"] == "too_many_files"
        server.delete(f"/v1/files/{first['id']}")
        server.upload(b"{}")


def test_uploads_in_progress_reserve_their_space(tmp_path: Path) -> None:
    kept = FilesDirectory(tmp_path, 10e6 / 1e9)
    one, two = Upload(kept), Upload(kept)
    one.write(b"x" * 3_000_000)
    two.write(b"y" * 100)
    assert 6_900_000 < kept.used_bytes() <= kept.limit_bytes
    with pytest.raises(RequestError, match="0.01 GB"):
        two.write(b"y" * 6_000_000)
    two.close()
    one.write(b"x" * 6_000_000)
    record = FileRecord(one.id, one.num_bytes, 0, "in", "batch")
    one.finish(record)
    one.close()
    assert FileStore(kept).get(one.id, None) == record
    assert kept.path(one.id, ".data").stat().st_size == 9_000_000
    assert kept.used_bytes() < 9_001_000


def test_files_of_killed_processes_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = FilesDirectory(tmp_path, 1)
    alive = Upload(kept)
    (tmp_path / "file-old.part").write_bytes(b"x")
    (tmp_path / "young.tmp").write_bytes(b"x")
    kept.sweep()
    assert len(list(tmp_path.iterdir())) == 4  # none is old enough
    monkeypatch.setattr(directory, "ABANDONED_S", -1.0)
    kept.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {"room.lock", f"{alive.id}.part"}
    alive.close()


def test_unusable_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="files_dir="):
        FilesDirectory(tmp_path / "file", 1)

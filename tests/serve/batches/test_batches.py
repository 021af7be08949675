"""/v1/batches: from an input file to its outputs, and every way to end early
(`serve/batches/batch_job.py`, `serve/batches/batches_routes.py`)."""

import asyncio
import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.serve.app import create_app
from quire.serve.batches import batch_store, line_runner
from quire.serve.batches.batch_job import LOW_PRIORITY, BatchJob, BatchResources
from quire.serve.batches.batch_store import BatchRecord, BatchStore, new_batch_id
from quire.serve.batches.batches import open_batches
from quire.serve.batches.directory import FilesDirectory
from quire.serve.batches.line_runner import Slots
from tests.serve.api.conftest import MakeContext
from tests.support.processes.servers import wait_until
from tests.support.serve.batch_files import request
from tests.support.serve.batch_server import KeptServer, serving
from tests.support.serve.direct_engine import text_of


def requests(number: int) -> list[dict[str, Any]]:
    return [request(f"r{index}", f"{index} foxes") for index in range(number)]


def test_completed_batch_has_output_and_error_files(
    make_context: MakeContext, tmp_path: Path
) -> None:
    lines = requests(6)
    lines[4]["body"]["temperature"] = -1
    with serving(make_context, tmp_path) as server:
        made = server.begin(lines, metadata={"for": "a test"}, completion_window="48h")
        assert made["object"] == "batch" and made["metadata"] == {"for": "a test"}
        assert made["expires_at"] - made["created_at"] == 48 * 3600
        done = server.wait_for(made["id"], "completed", "failed")
        assert done["status"] == "completed" and done["errors"] is None
        assert done["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        assert done["created_at"] <= done["in_progress_at"] <= done["finalizing_at"]
        assert done["completed_at"] and done["failed_at"] is done["cancelled_at"] is None
        answers = {line["custom_id"]: line for line in server.lines(done["output_file_id"])}
        [failed] = server.lines(done["error_file_id"])
        assert answers.keys() == {"r0", "r1", "r2", "r3", "r5"} and failed["custom_id"] == "r4"
        assert failed["response"]["status_code"] == 400 and failed["error"] is None
        for number in (0, 5):
            body = answers[f"r{number}"]["response"]["body"]
            assert body["choices"][0]["text"] == text_of(f"{number} foxes", max_tokens=4)
        bodies = [line["response"]["body"]["usage"] for line in answers.values()]
        assert done["usage"]["input_tokens"] == sum(u["prompt_tokens"] for u in bodies)
        assert done["usage"]["output_tokens"] == sum(u["completion_tokens"] for u in bodies)
        output = server.get(f"/v1/files/{done['output_file_id']}")
        assert output["purpose"] == "batch_output" and output["filename"].endswith(".jsonl")
        assert server.get("/v1/batches")["data"] == [done]
        server.delete(f"/v1/files/{done['input_file_id']}")
        conflict = server.post(f"/v1/batches/{made['id']}/cancel", status=409)
        assert conflict["error"]["code"] == "batch_is_done"
    assert {r.priority for r in server.context.client.requests} == {LOW_PRIORITY}
    assert not list(tmp_path.glob("batch_*.[ofc]*"))  # only the batch's record is left


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ("", [("empty_file", None)]),
        ("no json\n{}\n", [("invalid_json_line", 1), ("missing_required_parameter", 2)]),
        (json.dumps(request("a", url="/tokenize")) + "\n", [("invalid_url", 1)]),
        ((json.dumps(request("a")) + "\n") * 2, [("duplicate_custom_id", 2)]),
    ],
)
def test_invalid_input_lines_fail_the_whole_batch(
    make_context: MakeContext, tmp_path: Path, lines: str, faults: list[tuple[str, int]]
) -> None:
    with serving(make_context, tmp_path) as server:
        file_id = server.upload(lines.encode() or b"\n")["id"]
        made = server.post(
            "/v1/batches",
            input_file_id=file_id,
            endpoint="/v1/completions",
            completion_window="24h",
        )
        done = server.wait_for(made["id"], "failed", "completed")
        assert [(f["code"], f["line"]) for f in done["errors"]["data"]] == faults
        assert done["failed_at"] and done["output_file_id"] is done["error_file_id"] is None
        assert server.context.client.requests == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"input_file_id": "file-1"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
    ],
)
def test_invalid_batch_is_rejected(
    make_context: MakeContext, tmp_path: Path, changes: dict[str, Any], param: str | None
) -> None:
    with serving(make_context, tmp_path) as server:
        file_id = server.upload(b"{}")["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions"} | changes
        error = server.post("/v1/batches", status=400, **body)["error"]
        assert param in (None, error["param"]), error
        assert server.get("/v1/batches")["data"] == []
        server.get("/v1/batches/batch_1", status=404)
        assert server.get("/v1/batches?limit=0", status=400)["error"]["param"] == "limit"


def begun(server: KeptServer, number: int, num_done: int) -> Any:
    """Begin a batch that pauses once num_done lines, or a few more, are done."""
    server.context.client.hold(4 * num_done)
    made = server.begin(requests(number), output_expires_after=None)
    output = server.kept.records.directory.path(made["id"], batch_store.OUTPUT)
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= num_done)
    return made


def test_cancelled_batch_keeps_finished_lines(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, found = BatchJob._check_end, list[str | None]()

    def noted(job: BatchJob) -> None:
        look(job)
        found.append(job._ends_as)

    monkeypatch.setattr(BatchJob, "_check_end", noted)
    with serving(make_context, tmp_path) as server:
        made = begun(server, 30, num_done=2)
        server.delete(f"/v1/files/{made['input_file_id']}", status=409)
        reply = server.post(f"/v1/batches/{made['id']}/cancel")
        assert reply["status"] == "cancelling" and reply["cancelling_at"]
        assert server.get(f"/v1/batches/{made['id']}")["status"] == "cancelling"
        wait_until(lambda: "cancelled" in found, "the batch starts no more lines")
        server.context.client.release()
        done = server.wait_for(made["id"], "cancelled", "completed")
        assert done["status"] == "cancelled" and done["cancelled_at"] >= done["cancelling_at"]
        answers, left = (server.lines(done[f"{n}_file_id"]) for n in ("output", "error"))
        assert len(answers) >= 2 and len(left) > 2 and len(answers) + len(left) == 30
        assert {line["error"]["code"] for line in left} == {"batch_cancelled"}
        assert done["request_counts"] == {
            "total": 30, "completed": len(answers), "failed": len(left),
        }  # fmt: skip


def test_expired_batch_runs_no_lines(make_context: MakeContext, tmp_path: Path) -> None:
    with serving(make_context, tmp_path) as server:
        file_id = server.upload(b"".join(json.dumps(r).encode() + b"\n" for r in requests(3)))["id"]
        record = record_of(file_id, expires_at=1)
        server.kept.records.create(record)
        server.client.portal.call(server.kept.start, server.client.app)
        done = server.wait_for(record.id, "expired", "completed")
        assert done["status"] == "expired" and done["expired_at"]
        codes = [line["error"]["code"] for line in server.lines(done["error_file_id"])]
        assert codes == ["batch_expired"] * 3 and server.context.client.requests == []


def record_of(file_id: str, **changes: Any) -> BatchRecord:
    known: dict[str, Any] = {
        "id": new_batch_id(),
        "endpoint": "/v1/completions",
        "input_file_id": file_id,
        "completion_window": "24h",
        "created_at": int(time.time()),
        "expires_at": int(time.time()) + 3600,
    }
    return BatchRecord(**known | changes)


def test_next_server_resumes_a_batch(make_context: MakeContext, tmp_path: Path) -> None:
    with serving(make_context, tmp_path) as server:
        made = begun(server, 24, num_done=3)
    num_first = len(server.context.client.requests)
    left = server.kept.records.directory.path(made["id"], batch_store.OUTPUT).read_bytes()
    with serving(make_context, tmp_path) as second:
        second.client.portal.call(second.kept.start, second.client.app)
        done = second.wait_for(made["id"], "completed", "failed")
        assert done["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
        answers = second.lines(done["output_file_id"])
        assert sorted(line["custom_id"] for line in answers) == sorted(f"r{i}" for i in range(24))
        content = second.client.get(f"/v1/files/{done['output_file_id']}/content").content
        assert content.startswith(left) and left.count(b"\n") >= 3
    assert num_first < 24 and len(second.context.client.requests) == 24 - left.count(b"\n")


def test_one_server_runs_batches_until_another_takes_over(
    make_context: MakeContext, tmp_path: Path
) -> None:
    with serving(make_context, tmp_path) as second:
        with serving(make_context, tmp_path) as first:
            made = begun(first, 20, num_done=1)
            second.client.portal.call(second.kept.start, second.client.app)
            assert second.get(f"/v1/batches/{made['id']}")["status"] == "in_progress"
            assert second.get("/v1/batches")["data"][0]["request_counts"]["total"] == 20
            other = second.begin(requests(2))  # the first server will run it
            in_second = len(second.context.client.requests)
            second.post(f"/v1/batches/{other['id']}/cancel")
            first.context.client.release()
            first.wait_for(other["id"], "cancelled", "completed")
            assert in_second == len(second.context.client.requests) == 0
        third = second.begin(requests(2))
        assert second.wait_for(third["id"], "completed")["request_counts"]["completed"] == 2


def test_batch_belongs_to_its_api_key(make_context: MakeContext, tmp_path: Path) -> None:
    with serving(make_context, tmp_path, api_key=("one", "two")) as server:
        server.key = "two"
        made = server.begin(requests(2))
        server.wait_for(made["id"], "completed")
        assert {r.tenant for r in server.context.client.requests} == {"key 2"}
        server.key = "one"
        assert server.get("/v1/batches")["data"] == []
        server.get(f"/v1/batches/{made['id']}", status=404)
        server.post(f"/v1/batches/{made['id']}/cancel", status=404)
        server.key = "two"
        waiting = record_of(made["input_file_id"], owner="of another key")
        server.kept.records.create(waiting)
        store = server.kept.records
        wait_until(lambda: not [r for r in store.unfinished() if r.id == waiting.id])
        found = store.get(waiting.id, None)
        assert found is not None and found.faults[0].code == "key_removed"


def test_batch_leaves_half_of_the_rows_to_live_requests(
    make_context: MakeContext, tmp_path: Path
) -> None:
    with serving(make_context, tmp_path) as server:
        rows = server.context.client.ready.max_num_seqs
        server.context.client.hold()
        made = server.begin(requests(3 * rows))
        client = server.context.client
        wait_until(lambda: client.num_unfinished == rows // 2)
        wait_until(lambda: server.get(f"/v1/batches/{made['id']}")["status"] == "in_progress")
        assert client.num_unfinished == rows // 2
        client.release()
        server.wait_for(made["id"], "completed")


@pytest.mark.parametrize("num_turns", range(6))
def test_stop_ends_the_runner_at_any_await(
    make_context: MakeContext, tmp_path: Path, num_turns: int
) -> None:
    """Also just after a wake-up."""

    async def run() -> None:
        context = make_context(files_dir=str(tmp_path))
        kept = open_batches(context.config)
        assert kept is not None
        kept.start(create_app(context, kept))
        while not (tmp_path / "runner.lock").exists():
            await asyncio.sleep(0)
        await asyncio.sleep(0.005)  # the runner looks for batches, and waits
        kept.wake()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await asyncio.wait((asyncio.create_task(kept.stop()),), timeout=5)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_stop_during_validation_reports_no_error(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file turns out to be invalid after the stop; the next server reports that."""
    reading, may_end = threading.Event(), threading.Event()

    def read(self: BatchJob) -> None:
        reading.set()
        may_end.wait(10)
        raise RequestError("the file has too many lines.")

    monkeypatch.setattr(BatchJob, "_read", read)
    reported: list[dict[str, Any]] = []

    async def run() -> BatchRecord:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: reported.append(found))
        context = make_context(files_dir=str(tmp_path))
        kept = open_batches(context.config)
        assert kept is not None
        record = record_of("file-" + "0" * 32)
        kept.records.create(record)
        kept.start(create_app(context, kept))
        await asyncio.to_thread(reading.wait, 10)
        stopping = asyncio.create_task(kept.stop())
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait_for(stopping, 5)
        found = kept.records.get(record.id, None)
        assert found is not None
        return found

    found = asyncio.run(run())
    gc.collect()  # reports exceptions that were never retrieved
    assert reported == []
    assert found.status == "validating", "the next server validates it again"


def test_stop_does_not_wait_for_the_rest_of_a_file(
    make_context: MakeContext, tmp_path: Path
) -> None:
    context = make_context(files_dir=str(tmp_path))
    kept = open_batches(context.config)
    assert kept is not None
    looks = iter([False, False, True])
    resources = BatchResources(
        create_app(context, kept), kept.files, kept.records, Slots(1), lambda: next(looks)
    )
    record = record_of("file-" + "0" * 32)
    lines = "".join(json.dumps(each) + "\n" for each in requests(9))
    kept.files.directory.path(record.input_file_id, ".data").write_text(lines)
    asyncio.run(BatchJob(record, resources).run())
    assert list(looks) == [] and record.status == "validating" and not record.faults


def test_lines_wait_for_an_engine_restart(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_runner, "FIRST_PAUSE_S", 0.001)
    with serving(make_context, tmp_path) as server:
        client = server.context.client
        made = begun(server, 20, num_done=2)
        client.kill()
        client.release()
        wait_until(lambda: not client.num_unfinished)
        assert server.get(f"/v1/batches/{made['id']}")["status"] == "in_progress"
        client.revive()
        done = server.wait_for(made["id"], "completed", "failed")
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


def test_short_batch_does_not_wait_for_a_long_one(
    make_context: MakeContext, tmp_path: Path
) -> None:
    with serving(make_context, tmp_path) as server:
        client = server.context.client
        client.hold(2)
        batches = [server.begin(requests(60)), server.begin([request(n, "Owl") for n in "abc"])]
        wait_until(lambda: server.get(f"/v1/batches/{batches[1]['id']}")["status"] == "in_progress")
        client.release()
        for batch in batches:
            server.wait_for(batch["id"], "completed")
    owl = server.context.renderer.render("Owl").token_ids
    positions = [n for n, r in enumerate(client.requests) if r.prompt_token_ids == owl]
    assert len(positions) == 3 and max(positions) < 25 and len(client.requests) == 63


def test_full_directory_fails_the_batch_but_keeps_finished_lines(
    make_context: MakeContext, tmp_path: Path
) -> None:
    with serving(make_context, tmp_path, files_gb=1e-4) as server:
        made = begun(server, 30, num_done=2)
        (tmp_path / "large").write_bytes(b"x" * 100_000)
        server.context.client.release()
        done = server.wait_for(made["id"], "failed", "completed")
        assert done["errors"]["data"][0]["code"] == "no_room"
        assert 2 <= len(server.lines(done["output_file_id"])) < 30


def test_interrupted_finalization_is_repeated(make_context: MakeContext, tmp_path: Path) -> None:
    directory = FilesDirectory(tmp_path, 1)
    records, found = BatchStore(directory), []
    for is_moved in (False, True):
        record = record_of("file-" + "0" * 32, status="finalizing", total=1)
        record.output_file_id = "file-" + f"{is_moved:032x}"
        name, suffix = (record.output_file_id, ".data") if is_moved else (record.id, ".output")
        directory.path(name, suffix).write_bytes(b'{"a": 1}\n')
        records.save(record)
        found.append(record)
    with serving(make_context, tmp_path) as server:
        server.client.portal.call(server.kept.start, server.client.app)
        for record in found:
            done = server.wait_for(record.id, "completed")
            assert done["output_file_id"] == record.output_file_id
            assert server.lines(done["output_file_id"]) == [{"a": 1}]


def test_oldest_finished_batch_is_deleted_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 3)
    records = BatchStore(FilesDirectory(tmp_path, 1))
    made = [record_of("file", status=s) for s in ("in_progress", "completed", "failed")]
    for record in made:
        assert records.create(record)
    assert records.create(record_of("file")) and records.get(made[1].id, None) is None
    assert records.create(record_of("file")) and records.get(made[2].id, None) is None
    assert not records.create(record_of("file"))
    assert len(records.unfinished()) == 3 and records.unfinished()[0].id == made[0].id

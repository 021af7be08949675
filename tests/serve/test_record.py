"""`quire serve --record`: the runs of a real server are replayed, also after a kill."""

import http.client
import json
import threading
from pathlib import Path
from typing import Any

from quire.engine.recording.files import read_recording
from quire.engine.recording.frames import State
from quire.tools.replay import replay_all
from tests.support.processes.servers import WAIT_S, Server, kill, wait_until

RESTART = ("--restart-engine", "--shutdown-timeout", "5")


def ask(server: Server, prompt: str, **more: Any) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    body = {"model": "demo", "prompt": prompt, "max_tokens": 20} | more
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def read(server: Server, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", path)
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def test_recordings_of_killed_and_stopped_cores_replay(tmp_path: Path) -> None:
    """Requests with n and beams run together, and one is read while the server runs. Then the core
    is killed: its recording replays up to there, and the next core continues recording."""
    server = Server("--record", str(tmp_path / "run"), "--max-num-seqs", "6", *RESTART)
    try:
        stories = [f"Story {i}: once upon a time" for i in range(6)]
        kinds: list[dict[str, Any]] = [
            {},
            {"n": 3},
            {"use_beam_search": True, "n": 2, "temperature": 0},
        ]
        threads = [
            threading.Thread(target=ask, args=(server, story), kwargs=kinds[i % 3])
            for i, story in enumerate(stories)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer = ask(server, stories[0])
        timeline = read(server, f"/v1/requests/{answer['id']}")
        assert timeline["output_tokens"] == answer["usage"]["completion_tokens"]
        assert server.get("/v1/requests/cmpl-unknown") == 404
        wait_until(
            lambda: replay_all(read_recording(tmp_path / "run")).num_requests >= 6, "written"
        )
        kill(server.core)
        wait_until(lambda: server.get("/health") == 503, "the core is gone")
        wait_until(lambda: server.get("/health") == 200, "there is a new core")
        ask(server, "After the fall")
    finally:
        server.stop()
    segments = list(read_recording(tmp_path / "run"))
    assert len(segments) == 2
    outcome = replay_all(segments)
    assert outcome.difference is None, outcome.difference.lines()
    assert outcome.num_requests >= 7
    assert [segment.state for segment in segments] == [State.CUT, State.WHOLE]
    assert outcome.state is State.CUT and "segment-000001.rec is cut off" in outcome.notes[0]
    for path in (tmp_path / "run").iterdir():
        assert b"once upon" not in path.read_bytes()

"""A server in this process that keeps files, and what tests ask of it."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.batches.batches import Batches, open_batches
from quire.serve.context import ApiContext
from tests.serve.api.conftest import MakeContext
from tests.support.processes.servers import wait_until


class KeptServer:
    """client: of HTTP, as starlette's. key: that requests bring."""

    def __init__(self, context: ApiContext, kept: Batches, client: TestClient) -> None:
        self.context, self.kept, self.client = context, kept, client
        self.key = context.config.api_key[0].reveal() if context.config.api_key else ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str, status: int = 200) -> Any:
        found = self.client.get(path, headers=self.headers)
        assert found.status_code == status, found.text
        return found.json()

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        found = self.client.post(path, headers=self.headers, json=body)
        assert found.status_code == status, found.text
        return found.json()

    def delete(self, path: str, status: int = 200) -> Any:
        found = self.client.delete(path, headers=self.headers)
        assert found.status_code == status, found.text
        return found.json()

    def upload(self, content: bytes, status: int = 200, **fields: str) -> Any:
        found = self.client.post(
            "/v1/files",
            headers=self.headers,
            data={"purpose": "batch"} | fields,
            files={"file": ("in.jsonl", content)},
        )
        assert found.status_code == status, found.text
        return found.json()

    def begin(self, lines: list[dict[str, Any]], **more: Any) -> Any:
        """The batch of an upload of these lines."""
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file_id = self.upload(content)["id"]
        return self.post("/v1/batches", input_file_id=file_id, endpoint=lines[0]["url"], **more)

    def wait_for(self, batch_id: str, *statuses: str) -> Any:
        found: dict[str, Any] = {}

        def is_there() -> bool:
            found.update(self.get(f"/v1/batches/{batch_id}"))
            return found["status"] in statuses

        wait_until(is_there)
        return found

    def lines(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        found = self.client.get(f"/v1/files/{file_id}/content", headers=self.headers)
        assert found.status_code == 200
        return [json.loads(line) for line in found.text.splitlines()]


# An app gets its routes ready with its first requests, which takes long. By its settings, which its
# middleware knows.
SPARE: dict[str, list[FastAPI]] = defaultdict(list)


def settings_of(context: ApiContext) -> str:
    return repr(dataclasses.replace(context.config, files_dir=None))


def app_over(context: ApiContext, kept: Batches) -> FastAPI:
    """Return an app that serves nobody else; its own context becomes the given one."""
    spare = SPARE[settings_of(context)]
    if not spare:
        return create_app(context, kept)
    app = spare.pop()
    app.state.context.__dict__ = vars(context)
    app.state.batches = kept
    return app


@contextmanager
def serving(make_context: MakeContext, folder: Path, **server: Any) -> Iterator[KeptServer]:
    context = make_context(files_dir=str(folder), **server)
    kept = open_batches(context.config)
    assert kept is not None
    app = app_over(context, kept)
    with TestClient(app, raise_server_exceptions=False) as client:
        try:
            yield KeptServer(app.state.context, kept, client)
        finally:
            client.portal.call(kept.stop)
    SPARE[settings_of(context)].append(app)

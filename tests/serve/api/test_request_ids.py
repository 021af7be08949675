"""`http/middleware.py`: log lines of a request have its id."""

import asyncio

from starlette.types import Message, Receive, Scope, Send

from quire.engine.wire.logs import current_request
from quire.serve.http.middleware import RequestIds


async def seen_ids(*headers: tuple[bytes, bytes]) -> tuple[str | None, bytes]:
    """Return the id of the handler's log lines, and the id in the response."""
    found: list[str | None] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(current_request.get())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await RequestIds(app)({"type": "http", "headers": [*headers]}, receive, send)
    return found[0], dict(sent[0]["headers"])[b"x-request-id"]


async def check_two_requests() -> None:
    named, made = await asyncio.gather(
        asyncio.create_task(seen_ids((b"x-request-id", b"mine"))),
        asyncio.create_task(seen_ids()),
    )
    assert named == ("mine", b"mine")
    assert made[0] is not None and made[0].encode() == made[1] != b"mine"
    assert current_request.get() is None, "only the request's task has the id"


def test_each_request_has_its_own_id() -> None:
    asyncio.run(check_two_requests())

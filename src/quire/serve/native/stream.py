"""/v1/stream, a WebSocket: prompts in pieces, computed while more pieces arrive (T 4.4.4).

docs/use/streaming.md describes the messages. A connection has one request at a time. A bad request
ends, and its connection continues. A violation of the protocol closes the connection. A connection
that closes ends its request.
"""

import asyncio
import json
from contextlib import aclosing, suppress
from typing import Any

import fastapi
from fastapi import WebSocket, WebSocketDisconnect
from starlette.types import Message, Scope

from quire.base.errors import HookFailed, RequestError, StepFailed
from quire.base.settings.config import ServerConfig
from quire.serve.bodies.reading import read_in_thread
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import ApiContext, model_known
from quire.serve.errors import (
    ApiError,
    ApiHttpError,
    as_api_error,
    bad_request,
    error_response,
)
from quire.serve.http.auth import has_key, wrong_key
from quire.serve.http.limits import open_request
from quire.serve.http.middleware import new_id
from quire.serve.http.origins import refusal_of_handshake
from quire.serve.http.rate_gate import admit
from quire.serve.http.sse import encode
from quire.serve.native.open_request import OpenRequest
from quire.serve.pipeline.answer import Answer, Json

IDLE_S = 60.0  # timeout for the next piece of an open prompt
REST_S = 600.0  # timeout for the next request
# Close codes (RFC 6455, 7.4.1)
NORMAL, UNSUPPORTED, POLICY, INTERNAL = 1000, 1003, 1008, 1011
PIECE_FIELDS = {"append": {"prompt", "last"}, "end": set[str]()}

router = fastapi.APIRouter()


class Broken(Exception):
    """Violation of the protocol. The client gets the error, and the connection is closed."""

    def __init__(self, close_code: int, error: ApiError) -> None:
        super().__init__(error.message)
        self.close_code = close_code
        self.error = error


@router.websocket("/v1/stream")
async def stream(websocket: WebSocket) -> None:
    api: ApiContext = websocket.app.state.context
    refusal = refusal_of(websocket.scope, api.config)
    if refusal is not None:
        await refuse(websocket, refusal)
        return
    await websocket.accept()
    connection = Connection(websocket)
    try:
        await Session(api, connection, websocket.scope).serve()
    except WebSocketDisconnect:
        pass
    except Broken as broken:
        with suppress(WebSocketDisconnect):
            await connection.send_error(broken.error)
            code = broken.error.code
            await websocket.close(broken.close_code, None if code is None else str(code))
    finally:
        connection.leave()


def refusal_of(scope: Scope, config: ServerConfig) -> ApiError | None:
    """Return the error for a refused handshake, or None. A browser lets any page open a WebSocket
    to any server, so the server must check the page's origin."""
    if not has_key(scope, config.api_key):
        return wrong_key()
    return refusal_of_handshake(scope, config)


async def refuse(websocket: WebSocket, refusal: ApiError) -> None:
    """Refuse the handshake, with an error body if the server can send one, else with a bare 403."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(error_response(refusal))
    else:
        await websocket.close(POLICY)


class Connection:
    """One WebSocket connection: receives messages and sends objects."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._receiving: asyncio.Task[Message] | None = None

    async def next(
        self, seconds: float | None, unless: "asyncio.Task[None] | None" = None
    ) -> Message | None:
        """Return the next message, or None if `unless` ends first. Raises TimeoutError, and
        WebSocketDisconnect when the client disconnects.

        `unless` has begun to run when this returns, because its task was created before ours.
        """
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._websocket.receive())
        tasks = [task for task in (unless, self._receiving) if task is not None]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if unless is not None and unless.done():
            return None
        if not self._receiving.done():
            raise TimeoutError
        message, self._receiving = self._receiving.result(), None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        return message

    async def send(self, value: Json) -> None:
        await self._websocket.send_text(encode(value).decode())

    async def send_error(self, error: ApiError) -> None:
        """Send an error in ASCII, because it may quote client text that is invalid Unicode."""
        await self._websocket.send_text(json.dumps({"type": "error"} | error.body()))

    def leave(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()


class Session:
    """The requests of one connection, which run one after another."""

    def __init__(self, api: ApiContext, connection: Connection, scope: Scope) -> None:
        self._api = api
        self._connection = connection
        self._scope = scope
        self._has_failed = False  # whether the last request failed; its later messages are dropped

    async def serve(self) -> None:
        """Serve requests until WebSocketDisconnect or Broken is raised."""
        while True:
            try:
                message = await self._connection.next(REST_S)
            except TimeoutError:
                raise Broken(NORMAL, _too_quiet(REST_S, "between two requests")) from None
            assert message is not None
            kind, fields = await parsed(message)
            if kind == "start":
                self._has_failed = not await self._serve_one(fields)
            elif not self._has_failed:
                text = f"no prompt is open for {kind!r}; begin with a message of type 'start'."
                await self._connection.send_error(bad_request(text, "type", "not_open"))

    async def _serve_one(self, fields: Json) -> bool:
        """Serve one request to `done` or to an error; return whether it reached `done`."""
        request_id = new_id("cmpl")
        try:
            async with open_request(self._api):
                if self._api.rates is not None:
                    admit(self._api.rates, self._api, self._scope)
                await self._run(fields, request_id)
        except (WebSocketDisconnect, Broken):
            raise
        except Exception as error:
            api_error = as_api_error(error, request_id)
            if api_error.status == 500 and not isinstance(error, StepFailed | HookFailed):
                raise Broken(INTERNAL, api_error) from error
            await self._connection.send_error(api_error)
            return False
        await self._connection.send({"type": "done", "id": request_id})
        return True

    async def _run(self, fields: Json, request_id: str) -> None:
        is_last, prompt = _last(fields), fields.get("prompt")
        fields.pop("last", None)
        api = self._api.of_model(fields.get("model"))
        await model_known(api, fields.get("model"))
        request = OpenRequest(api, fields, self._scope, request_id)
        await self._connection.send(
            {"type": "started", "id": request_id, "model": request.plan.model}
        )
        await request.take(prompt, is_last)
        answering: asyncio.Task[None] | None = None
        try:
            while True:
                if answering is None and request.answer is not None:
                    answering = asyncio.create_task(self._send_answer(request.answer))
                message = await self._next(request, answering)
                if message is None:
                    break
                await self._take(request, message, answering)
            assert answering is not None
            answering.result()
        finally:
            if answering is not None:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)

    async def _next(
        self, request: OpenRequest, answering: "asyncio.Task[None] | None"
    ) -> Message | None:
        """Return the next message; None when the answer is complete."""
        try:
            return await self._connection.next(None if request.is_complete else IDLE_S, answering)
        except TimeoutError:
            raise Broken(POLICY, _too_quiet(IDLE_S, "while the prompt is open")) from None

    async def _take(
        self,
        request: OpenRequest,
        message: Message,
        answering: "asyncio.Task[None] | None",
    ) -> None:
        """Handle a message that arrives while a request is open."""
        if request.is_complete:
            await self._connection.send_error(_busy("its answer is being sent"))
            return
        kind, fields = await parsed(message)
        if kind == "start":
            await self._connection.send_error(_busy("its prompt is open"))
            return
        _check_fields(kind, fields)
        try:
            is_last = kind == "end" or _last(fields)
            await request.take(fields.get("prompt"), is_last)
        except RequestError:
            if answering is not None:  # the request may have failed before; then raise that error
                await asyncio.wait([answering], timeout=0)
                if answering.done():
                    answering.result()
            raise

    async def _send_answer(self, answer: Answer) -> None:
        async with aclosing(answer.chunks()) as pieces:
            async for chunks in pieces:
                for chunk in chunks:
                    await self._connection.send(chunk)


async def parsed(message: Message) -> tuple[str, Json]:
    """Return a message's type and its other fields. Raises Broken for an invalid message."""
    text = message.pop("text", None)  # drop this reference, because the text may be large
    if text is None:
        raise Broken(UNSUPPORTED, _no_message("it must be text, not binary"))
    data = text.encode("utf-8", "surrogatepass")
    del text
    try:
        fields: Any = await read_in_thread(data, "the message")
    except ApiHttpError as error:
        raise Broken(POLICY, error.error) from error
    except json.JSONDecodeError as error:
        reason = f"it is not valid JSON: {error.msg} at character {error.pos}"
        raise Broken(POLICY, _no_message(reason)) from error
    except ValueError as error:
        raise Broken(POLICY, _no_message("it holds a number with too many digits")) from error
    except RecursionError as error:
        raise Broken(POLICY, _no_message("it is nested too deeply")) from error
    if not isinstance(fields, dict):
        raise Broken(POLICY, _no_message(f"it must be a JSON object, got {shown(fields)}"))
    kind = fields.pop("type", None)
    if not isinstance(kind, str) or (kind != "start" and kind not in PIECE_FIELDS):
        reason = f"its type must be 'start', 'append' or 'end', got {shown(kind)}"
        raise Broken(POLICY, _no_message(reason))
    return kind, fields


def _check_fields(kind: str, fields: Json) -> None:
    for name in fields.keys() - PIECE_FIELDS[kind]:
        raise bad_request(f"a message of type {kind!r} has no field {shown(name)}; remove it.")


def _last(fields: Json) -> bool:
    value = fields.get("last", False)
    if not isinstance(value, bool):
        raise bad_request(f"last must be true or false, got {shown(value)}.", "last")
    return value


def _no_message(reason: str) -> ApiError:
    return bad_request(f"the message cannot be used: {reason}.", code="invalid_message")


def _busy(why: str) -> ApiError:
    text = f"a request is open on this connection and {why}; wait for 'done', or open another one."
    return ApiError(409, text, code="busy")


def _too_quiet(seconds: float, when: str) -> ApiError:
    text = f"no message arrived for {seconds:g} s {when}; the connection is closed."
    return ApiError(408, text, "timeout_error", code="idle_timeout")

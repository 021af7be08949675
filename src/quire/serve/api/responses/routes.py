"""/v1/responses: a response is made, and what is stored of those of a key is shown and ended."""

from typing import Annotated, Any, Literal

import fastapi
import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from quire.serve.api.context import Api, ApiContext
from quire.serve.api.disconnect import unless_disconnected
from quire.serve.api.errors import ApiError, bad_request, request_id_of
from quire.serve.api.limits import generating
from quire.serve.api.reading import BoundedRoute
from quire.serve.api.responses.background import RunningResponse
from quire.serve.api.responses.body import ResponsesRequest
from quire.serve.api.responses.store import Stored
from quire.serve.api.responses.turn import make_turn, owner_of
from quire.serve.api.sse import Events, encode, start_stream
from quire.serve.api.structured import with_warnings
from quire.serve.api.validation_errors import shown

MAX_ITEMS = 100

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/responses", dependencies=[Depends(generating)])
async def create_response(body: ResponsesRequest, request: fastapi.Request, api: Api) -> Response:
    """The next turn of a conversation: reasoning, text and calls of functions."""
    turn = await make_turn(api, body, request.scope)
    if body.background:
        running = turn.start()
        if body.stream:
            response = await start_stream(request, running.follow(0))
        else:
            response = _json(turn.writer.response)
    elif body.stream:
        response = await start_stream(request, turn.stream(request_id_of(request)))
    else:
        response = _json(await unless_disconnected(request.receive, turn.whole()))
    return with_warnings(response, turn.chat.grammar)


@router.get("/v1/responses/{response_id}")
async def show_response(
    response_id: str,
    request: fastapi.Request,
    api: Api,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """A stored response, or one that runs in the background; with `stream` its events, from behind
    number `starting_after` on."""
    running, stored = _found(api, request, response_id)
    if stream:
        return await start_stream(request, _events(running, stored, starting_after + 1))
    if running is not None:
        return _json(running.response())
    assert stored is not None
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: fastapi.Request, api: Api) -> dict[str, Any]:
    """Keep it no longer. One that runs in the background ends."""
    running, _ = _found(api, request, response_id)
    if running is not None:
        await running.cancel()
    api.responses.store.remove(owner_of(request.scope, api), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: fastapi.Request, api: Api) -> Response:
    """End a response that runs in the background; one that is over is shown as it is."""
    running, stored = _found(api, request, response_id)
    if running is not None:
        await running.cancel()
        return _json(running.response())
    assert stored is not None
    if not msgspec.json.decode(stored.response)["background"]:
        text = f"{shown(response_id)} cannot be cancelled: it was not made with background=true."
        raise bad_request(text, "response_id")
    return Response(stored.response, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: fastapi.Request,
    api: Api,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """The items of a stored response's own input, newest first unless `order` is asc."""
    _, stored = _found(api, request, response_id)
    if stored is None:
        text = f"{shown(response_id)} is still being made; its items are shown when it is over."
        raise bad_request(text, "response_id", "response_not_finished")
    items = msgspec.json.decode(stored.items)
    items = items[::-1] if order == "desc" else items
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_request(f"after: there is no item {shown(after)} in this input.", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ends = [page[0]["id"], page[-1]["id"]] if page else ["", ""]
    return {
        "object": "list",
        "data": page,
        "first_id": ends[0],
        "last_id": ends[1],
        "has_more": len(items) > len(page),
    }


def _found(
    api: ApiContext, request: fastapi.Request, response_id: str
) -> tuple[RunningResponse | None, Stored | None]:
    """Return a response of the caller, one way or the other. Raises ApiError 404."""
    owner = owner_of(request.scope, api)
    running = api.responses.running(owner, response_id)
    stored = None if running is not None else api.responses.store.get(owner, response_id)
    if running is None and stored is None:
        text = (
            f"there is no response {shown(response_id)} of yours here: it was made with"
            " store=false, deleted, or has made room for others."
        )
        raise ApiError(404, text, param="response_id", code="not_found")
    return running, stored


def _events(running: RunningResponse | None, stored: Stored | None, first: int) -> Events:
    """Return the events of a response from a number on. Raises ApiError where none are kept."""
    if running is not None:
        return running.follow(first)
    assert stored is not None
    if stored.events is None:
        text = "stream: only a response that was made with background and stream can be read so."
        raise bad_request(text, "stream")
    return _kept(stored.events[first:])


async def _kept(events: tuple[bytes, ...]) -> Events:
    for each in events:
        yield each


def _json(value: dict[str, Any]) -> Response:
    return Response(encode(value), media_type="application/json")

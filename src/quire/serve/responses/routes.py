"""/v1/responses: create responses; show, cancel and delete the stored responses of a key."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import fastapi
import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from quire.serve.bodies.constraints import with_warnings
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import Api, ApiContext
from quire.serve.errors import ApiError, bad_request
from quire.serve.http.auth import has_key
from quire.serve.http.limits import generating
from quire.serve.http.middleware import request_id_of
from quire.serve.http.sse import Events, encode, start_stream, unless_disconnected
from quire.serve.responses.background import RunningResponse, error_event
from quire.serve.responses.body import ResponsesRequest
from quire.serve.responses.start import make_turn, owner_of
from quire.serve.responses.store import Stored, process_of

MAX_ITEMS = 100


class StoredRoute(BoundedRoute):
    """A route for a stored response, which another API process may hold."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def handle_here_or_there(request: fastapi.Request) -> fastapi.Response:
            api: ApiContext = request.app.state.context
            number = process_of(request.path_params["response_id"])
            if api.peers.is_other(number) and has_key(request.scope, api.config.api_key):
                return await api.peers.pass_on(request, number, error_event)
            response: fastapi.Response = await handle(request)
            return response

        return handle_here_or_there


router = APIRouter(route_class=BoundedRoute)
stored_router = APIRouter(route_class=StoredRoute)


@router.post("/v1/responses", dependencies=[Depends(generating)])
async def create_response(body: ResponsesRequest, request: fastapi.Request, api: Api) -> Response:
    """Return the next turn of a conversation: reasoning, text and function calls."""
    if (other := _other_of(api, body)) is not None:
        return await api.peers.pass_on(request, other, error_event)
    turn = await make_turn(api, body, request.scope)
    if body.background:
        running = turn.start()
        if body.stream:
            response = await start_stream(request, running.follow(0), error_event)
        else:
            response = _json(turn.writer.response)
    elif body.stream:
        response = await start_stream(request, turn.stream(request_id_of(request)), error_event)
    else:
        response = _json(await unless_disconnected(request.receive, turn.whole()))
    return with_warnings(response, turn.chat.grammar)


@stored_router.get("/v1/responses/{response_id}")
async def show_response(
    response_id: str,
    request: fastapi.Request,
    api: Api,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a stored response or one that runs in the background. With `stream`, return its events
    after number `starting_after`."""
    running, stored = _found(api, request, response_id)
    if stream:
        events = _events(running, stored, starting_after + 1)
        return await start_stream(request, events, error_event)
    if running is not None:
        return _json(running.response())
    assert stored is not None
    return Response(stored.response, media_type="application/json")


@stored_router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: fastapi.Request, api: Api) -> dict[str, Any]:
    """Delete a response. A response that runs in the background is cancelled."""
    running, _ = _found(api, request, response_id)
    if running is not None:
        await running.cancel()
    api.responses.store.remove(owner_of(request.scope, api), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@stored_router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: fastapi.Request, api: Api) -> Response:
    """Cancel a response that runs in the background, and return it. An ended one is unchanged."""
    running, stored = _found(api, request, response_id)
    if running is not None:
        await running.cancel()
        return _json(running.response())
    assert stored is not None
    if not msgspec.json.decode(stored.response)["background"]:
        text = f"{shown(response_id)} cannot be cancelled: it was not created with background=true."
        raise bad_request(text, "response_id")
    return Response(stored.response, media_type="application/json")


@stored_router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: fastapi.Request,
    api: Api,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """Return the items of a stored response's own input, newest first unless `order` is asc."""
    _, stored = _found(api, request, response_id)
    if stored is None:
        text = f"{shown(response_id)} is still in progress; list its items when it has ended."
        raise bad_request(text, "response_id", "response_not_finished")
    items = msgspec.json.decode(stored.items)
    items = items[::-1] if order == "desc" else items
    if after is not None:
        positions = [position for position, item in enumerate(items) if item["id"] == after]
        if not positions:
            raise bad_request(f"after: there is no item {shown(after)} in this input.", "after")
        items = items[positions[0] + 1 :]
    page = items[:limit]
    ends = [page[0]["id"], page[-1]["id"]] if page else ["", ""]
    return {
        "object": "list",
        "data": page,
        "first_id": ends[0],
        "last_id": ends[1],
        "has_more": len(items) > len(page),
    }


def _other_of(api: ApiContext, body: ResponsesRequest) -> int | None:
    """Return the other process that holds a body's context; None for this one or none."""
    items = body.input if isinstance(body.input, list) else []
    named = [body.previous_response_id]
    named += [item.get("id") for item in items if _is_reference(item)]
    found = [process_of(each) for each in named if isinstance(each, str)]
    if api.peers.number in found:
        return None
    return next((number for number in found if api.peers.is_other(number)), None)


def _is_reference(item: object) -> bool:
    return isinstance(item, Mapping) and item.get("type", "item_reference") == "item_reference"


def _found(
    api: ApiContext, request: fastapi.Request, response_id: str
) -> tuple[RunningResponse | None, Stored | None]:
    """Return the caller's response as either running or stored. Raises ApiError 404."""
    owner = owner_of(request.scope, api)
    running = api.responses.running(owner, response_id)
    stored = None if running is not None else api.responses.store.get(owner, response_id)
    if running is None and stored is None:
        text = (
            f"there is no response {shown(response_id)} of yours: it was created with store=false,"
            " deleted or evicted."
        )
        raise ApiError(404, text, param="response_id", code="not_found")
    return running, stored


def _events(running: RunningResponse | None, stored: Stored | None, first: int) -> Events:
    """Return a response's events from number `first` on. Raises ApiError if not stored."""
    if running is not None:
        return running.follow(first)
    assert stored is not None
    if stored.events is None:
        text = (
            "stream: only a response created with background=true and stream=true can be streamed."
        )
        raise bad_request(text, "stream")
    return _stored_events(stored.events[first:])


async def _stored_events(events: tuple[bytes, ...]) -> Events:
    for each in events:
        yield each


def _json(value: dict[str, Any]) -> Response:
    return Response(encode(value), media_type="application/json")

"""Context of a response: the earlier conversation, and stored items that references name."""

from typing import Any

import msgspec
from starlette.types import Scope

from quire.serve.bodies.validation_errors import shown
from quire.serve.context import ApiContext
from quire.serve.errors import bad_request
from quire.serve.http.auth import reader_of
from quire.serve.pipeline.plan import Continued
from quire.serve.responses.body import ResponsesRequest
from quire.serve.responses.conversation import messages_of
from quire.serve.responses.custom_tools import described_tools
from quire.serve.responses.store import Stored

Json = dict[str, Any]
PREVIOUS = "previous_response_id"


async def earlier_items(api: ApiContext, owner: str, response_id: str | None) -> list[Json]:
    """Return the items of a stored response and its predecessors, oldest first. Raises ApiError if
    one of them is not stored."""
    if response_id is None:
        return []
    if api.responses.running(owner, response_id) is not None:
        text = f"{PREVIOUS}: {response_id} is still in progress; wait until it is completed."
        raise bad_request(text, PREVIOUS, "previous_response_not_finished")
    found = api.responses.store.conversation(owner, response_id)
    if isinstance(found, str):
        which = "" if found == response_id else f", which continues {shown(response_id)},"
        raise bad_request(
            f"{PREVIOUS}: there is no stored response {shown(found)}{which} of yours: it was"
            " created with store=false, deleted or evicted. Send its items as input.",
            PREVIOUS,
            "previous_response_not_found",
        )
    num_chars = sum(stored.num_bytes for stored in found)
    return await api.text_threads.run(num_chars, _items_of, found)


async def continued_turn(
    api: ApiContext, body: ResponsesRequest, owner: str, scope: Scope, items: list[Json]
) -> Continued | None:
    """Return the retained request that a response continues, with the messages to append. The
    result is the conversation rendered again, without the template's omissions in earlier turns.
    Return None if no ended request is retained, or if instructions, tools, salt or roles do not
    fit."""
    previous = body.previous_response_id
    stored = None if previous is None else api.responses.store.get(owner, previous)
    if previous is None or stored is None:
        return None
    previous_response = msgspec.json.decode(stored.response)
    tools = described_tools(body.tools)
    if (previous_response["instructions"], previous_response["tools"]) != (
        body.instructions,
        tools,
    ):
        return None
    found = await api.client.held(previous, 0, reader_of(scope, api.config.api_key))
    if not found or found[0].expires_in_s is None:
        return None
    if body.cache_salt != (found[0].cache_salt or None):
        return None
    messages = messages_of(None, items)
    begins_turn = bool(messages) and messages[0]["role"] in ("user", "tool")
    return Continued(found[0], messages) if begins_turn else None


def _items_of(conversation: list[Stored]) -> list[Json]:
    items: list[Json] = []
    for stored in conversation:
        items += msgspec.json.decode(stored.items)
        items += output_of(stored)
    return items


def output_of(stored: Stored) -> list[Json]:
    """Return the items of a response's output."""
    found: list[Json] = msgspec.json.decode(stored.response)["output"]
    return found


def without_references(api: ApiContext, owner: str, items: list[Json]) -> list[Json]:
    """Return the items with references replaced by the items that they name. Raises ApiError for an
    item that is not stored."""
    outputs: dict[int, dict[str, Json]] = {}  # by response, to decode each once

    def resolved(index: int, item: Json) -> Json:
        if item["type"] != "item_reference":
            return item
        stored = api.responses.store.with_item(owner, item["id"])
        if stored is None:
            where = f"input[{index}].id"
            raise bad_request(
                f"{where}: there is no stored item {shown(item['id'])} of yours; send the item"
                " itself.",
                where,
                "item_not_found",
            )
        if id(stored) not in outputs:
            outputs[id(stored)] = {each["id"]: each for each in output_of(stored)}
        return outputs[id(stored)][item["id"]]

    return [resolved(index, item) for index, item in enumerate(items)]

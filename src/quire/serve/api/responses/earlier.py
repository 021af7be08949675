"""What a response goes on from: the conversation before it, and stored items that it names."""

from typing import Any

import msgspec

from quire.serve.api.context import ApiContext
from quire.serve.api.errors import bad_request
from quire.serve.api.responses.store import Stored
from quire.serve.api.validation_errors import shown

Json = dict[str, Any]
PREVIOUS = "previous_response_id"


async def earlier_items(api: ApiContext, owner: str, response_id: str | None) -> list[Json]:
    """Return the items of a stored response and of those before it, the oldest first. Raises
    ApiError if one of them is not stored."""
    if response_id is None:
        return []
    if api.responses.running(owner, response_id) is not None:
        text = f"{PREVIOUS}: {response_id} is still being made; wait until it is completed."
        raise bad_request(text, PREVIOUS, "previous_response_not_finished")
    found = api.responses.store.conversation(owner, response_id)
    if isinstance(found, str):
        which = "" if found == response_id else f", which goes on from {shown(response_id)},"
        raise bad_request(
            f"{PREVIOUS}: there is no stored response {shown(found)}{which} of yours: it was made"
            " with store=false, deleted, or has made room for others. Send its items as input.",
            PREVIOUS,
            "previous_response_not_found",
        )
    num_chars = sum(stored.num_bytes for stored in found)
    return await api.lanes.run(num_chars, _items_of, found)


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
    """Return items with those that references name in their place. Raises ApiError for one that is
    not stored."""
    outputs: dict[int, dict[str, Json]] = {}  # of each response, decoded once

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

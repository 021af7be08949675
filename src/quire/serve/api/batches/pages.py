"""Lists in pages, as OpenAI's: `after` is the last id of the page before."""

from typing import Any

from quire.serve.api.errors import bad_request
from quire.serve.api.validation_errors import shown


def page(
    items: list[dict[str, Any]], limit: int, after: str | None, order: str = "desc"
) -> dict[str, Any]:
    """Return a page. items: oldest first. Raise ApiError if none has the id `after`."""
    ordered = items if order == "asc" else items[::-1]
    begin = 0
    if after is not None:
        places = [number for number, item in enumerate(ordered, 1) if item["id"] == after]
        if not places:
            raise bad_request(f"after must be an id of this list, got {shown(after)}.", "after")
        begin = places[0]
    found = ordered[begin : begin + limit]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": begin + limit < len(ordered),
    }

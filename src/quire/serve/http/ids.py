"""Ids of HTTP requests and of responses."""

import uuid

import fastapi


def request_id_of(request: fastapi.Request) -> str:
    """Return the id in the response's X-Request-Id, which the log shows, too."""
    return str(request.scope.get("state", {}).get("request_id", ""))


def answer_id_of(request_id: str) -> str:
    """Return the response id of an engine request. A completion has one engine request per prompt,
    and a retained completion has one prompt."""
    return request_id.removesuffix("-0") if request_id.startswith("cmpl-") else request_id


def new_id(prefix: str) -> str:
    """Return a unique id such as cmpl-3f2a...; clients cannot choose these ids."""
    return f"{prefix}-{uuid.uuid4().hex}"

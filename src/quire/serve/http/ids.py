"""Ids of HTTP requests and of answers."""

import uuid

import fastapi


def request_id_of(request: fastapi.Request) -> str:
    """Return the id that the answer's X-Request-Id shows, to be found again in the log."""
    return str(request.scope.get("state", {}).get("request_id", ""))


def answer_id_of(request_id: str) -> str:
    """Return the id of the answer that one of the engine's requests belongs to: a completion has
    one for each prompt, and those that are kept have one prompt."""
    return request_id.removesuffix("-0") if request_id.startswith("cmpl-") else request_id


def new_id(prefix: str) -> str:
    """Return a unique id such as cmpl-3f2a...; ids are never taken from what a client sends."""
    return f"{prefix}-{uuid.uuid4().hex}"

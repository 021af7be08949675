"""Routes of /v1/batches: files of requests, which the engine answers at low priority."""

import asyncio
import re
import time
from typing import Annotated, Any, Literal

import fastapi
from fastapi import APIRouter, Query
from pydantic import Field

from quire.serve.batches.app_caller import BATCH_URLS
from quire.serve.batches.batch_store import MAX_BATCHES, BatchRecord, BatchStore, new_batch_id
from quire.serve.batches.batches import Batches
from quire.serve.batches.directory import owner_of, page, visible_owner
from quire.serve.batches.files_routes import MAX_LIFETIME_S, MIN_LIFETIME_S, BatchesDep
from quire.serve.bodies.open_body import OpenBody, StrictBody, at_most, becomes
from quire.serve.bodies.protocol import Label
from quire.serve.bodies.reading import BoundedRoute
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import Api
from quire.serve.errors import ApiError, bad_request

router = APIRouter(route_class=BoundedRoute)

WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MAX_METADATA = 16
MAX_VALUE_CHARS = 512
HOUR_S = 3600

MetadataValue = Annotated[str, Field(max_length=MAX_VALUE_CHARS)]
Metadata = Annotated[
    dict[str, MetadataValue], Field(max_length=MAX_METADATA), at_most(MAX_METADATA)
]


class ExpiresAfter(StrictBody):
    """Lifetime of the output files."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)]


class BatchBody(OpenBody):
    """A batch to run. completion_window: hours, such as 24h, after which the batch expires."""

    input_file_id: Label = becomes("BatchRecord.input_file_id", default=...)
    endpoint: Label = becomes("BatchRecord.endpoint", default=...)
    completion_window: Label = becomes("BatchRecord.expires_at", default="24h")
    metadata: Metadata | None = becomes("BatchRecord.metadata")
    output_expires_after: Annotated[ExpiresAfter, at_most(2)] | None = becomes(
        "BatchRecord.output_ttl_s"
    )


@router.post("/v1/batches")
async def create_batch(
    body: BatchBody, request: fastapi.Request, api: Api, store: BatchesDep
) -> dict[str, Any]:
    """Create a batch from a file of requests. It runs later; GET shows its progress."""
    if body.endpoint not in BATCH_URLS:
        known = ", ".join(sorted(BATCH_URLS))
        message = f"endpoint must be one of {known}, got {shown(body.endpoint)}."
        raise bad_request(message, "endpoint")
    window = WINDOW.fullmatch(body.completion_window)
    if window is None:
        message = (
            f"completion_window must be hours such as 24h, got {shown(body.completion_window)}."
        )
        raise bad_request(message, "completion_window")
    owner = visible_owner(request.scope, api.config.api_key)
    file = await asyncio.to_thread(store.files.get, body.input_file_id, owner)
    if file is None or file.purpose != "batch":
        raise bad_request(
            "input_file_id must be one of your files with purpose=batch, got"
            f" {shown(body.input_file_id)}; upload one to /v1/files.",
            "input_file_id",
        )
    now, expires = int(time.time()), body.output_expires_after
    record = BatchRecord(
        id=new_batch_id(),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + int(window[1]) * HOUR_S,
        owner=owner_of(request.scope, api.config.api_key),
        output_ttl_s=None if expires is None else expires.seconds,
        metadata=body.metadata,
    )
    if not await asyncio.to_thread(store.records.create, record):
        message = f"{MAX_BATCHES} batch jobs are waiting already; try again when some are done."
        raise ApiError(429, message, "rate_limit_error", code="too_many_batches")
    store.start(request.app)
    store.wake()
    return batch_json(record, store.records)


@router.get("/v1/batches")
async def list_batches(
    request: fastapi.Request,
    api: Api,
    store: BatchesDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> dict[str, Any]:
    """List the batches of the caller's key, newest first; without keys, all batches."""
    owner = visible_owner(request.scope, api.config.api_key)

    def listed() -> list[dict[str, Any]]:
        return [batch_json(record, store.records) for record in store.records.seen(owner)]

    return page(await asyncio.to_thread(listed), limit, after)


@router.get("/v1/batches/{batch_id}")
async def show_batch(
    batch_id: str, request: fastapi.Request, api: Api, store: BatchesDep
) -> dict[str, Any]:
    """Show the state and the progress of a batch."""
    return batch_json(await _found(batch_id, request, api, store), store.records)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(
    batch_id: str, request: fastapi.Request, api: Api, store: BatchesDep
) -> dict[str, Any]:
    """Cancel a batch. Its open lines finish, and finished lines stay."""
    record = await _found(batch_id, request, api, store)
    if record.is_final:
        message = f"batch {record.id} is {record.status} already and cannot be cancelled."
        raise ApiError(409, message, param="batch_id", code="batch_is_done")
    await asyncio.to_thread(store.records.cancel, record.id)
    store.wake()
    return batch_json(record, store.records)


async def _found(batch_id: str, request: fastapi.Request, api: Api, store: Batches) -> BatchRecord:
    owner = visible_owner(request.scope, api.config.api_key)
    record = await asyncio.to_thread(store.records.get, batch_id, owner)
    if record is None:
        message = f"you have no batch {shown(batch_id)}; GET /v1/batches lists them."
        raise ApiError(404, message, param="batch_id", code="not_found")
    return record


def batch_json(record: BatchRecord, records: BatchStore) -> dict[str, Any]:
    """Return a batch in OpenAI's format."""
    times = dict(record.times)
    status = record.status
    if not record.is_final and (requested_at := records.cancelled_at(record.id)) is not None:
        status, times["cancelling"] = "cancelling", requested_at
    faults = [
        {"code": f.code, "line": f.line, "message": f.message, "param": f.param}
        for f in record.faults
    ]
    tally = record.tally
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": status,
        "output_file_id": record.output_file_id if record.is_final else None,
        "error_file_id": record.error_file_id if record.is_final else None,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{f"{name}_at": times.get(name) for name in TIMES},
        "request_counts": {
            "total": record.total, "completed": tally.num_completed, "failed": tally.num_failed,
        },
        "usage": tally.usage(),
        "metadata": record.metadata,
    }  # fmt: skip


TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

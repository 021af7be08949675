"""Routes of /v1/files: inputs and outputs of batches. A key sees its own files; without keys, all
are seen."""

import asyncio
import os
import time
from typing import Annotated, Any, BinaryIO, Literal

import fastapi
from fastapi import APIRouter, Depends, Query
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from quire.base.errors import RequestError
from quire.serve.batches.batches import Batches
from quire.serve.batches.directory import NO_ROOM, owner_of, page, visible_owner
from quire.serve.batches.file_store import DATA, MAX_FILES, FileRecord, Upload
from quire.serve.batches.upload_form import UploadForm
from quire.serve.bodies.validation_errors import shown
from quire.serve.context import Api
from quire.serve.errors import ApiError, bad_request
from quire.serve.http.sse import CLIENT_CLOSED

router = APIRouter()

ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 2592000
FORM_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "file": {"type": "string", "format": "binary"},
                    },
                    "required": ["purpose", "file"],
                }
            }
        },
    }
}


async def batches(request: fastapi.Request) -> Batches:
    """Return the server's files and batches. Raise ApiError 404 if it has no directory for them."""
    found: Batches | None = request.app.state.batches
    if found is None:
        message = (
            "files and batches are disabled on this server; start it with --files-dir DIR, or use"
            " `quire batch`."
        )
        raise ApiError(404, message, code="no_files_dir")
    return found


BatchesDep = Annotated[Batches, Depends(batches)]


@router.post("/v1/files", openapi_extra=FORM_SCHEMA)
async def upload_file(request: fastapi.Request, api: Api, store: BatchesDep) -> dict[str, Any]:
    """Store an uploaded file; its data goes to disk as it arrives."""
    owner = owner_of(request.scope, api.config.api_key)
    await asyncio.to_thread(_make_room, store)
    upload = await asyncio.to_thread(Upload, store.files.directory)
    try:
        form = UploadForm(upload)
        await form.read(request)
        record = _record(form, upload, owner)
        await asyncio.to_thread(upload.finish, record)
    except RequestError as error:
        if error.code != NO_ROOM:
            raise
        raise ApiError(413, str(error), param="file", code=NO_ROOM) from error
    except ClientDisconnect as error:
        raise ApiError(
            CLIENT_CLOSED, "the client closed the connection.", code="client_closed"
        ) from error
    finally:
        upload.close()
    return _as_json(record)


@router.get("/v1/files")
async def list_files(
    request: fastapi.Request,
    api: Api,
    store: BatchesDep,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_FILES)] = MAX_FILES,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List the files of the caller's key; without keys, all files."""
    owner = visible_owner(request.scope, api.config.api_key)
    found = await asyncio.to_thread(store.files.seen, owner, purpose)
    return page([_as_json(record) for record in found], limit, after, order)


@router.get("/v1/files/{file_id}")
async def show_file(
    file_id: str, request: fastapi.Request, api: Api, store: BatchesDep
) -> dict[str, Any]:
    """Show the record of a file."""
    return _as_json(await _found(file_id, request, api, store))


class OpenFileResponse(FileResponse):
    """Response that sends an open file and closes it. Deleting the file meanwhile does no harm."""

    def __init__(self, file: BinaryIO, filename: str, media_type: str) -> None:
        number = file.fileno()
        super().__init__(
            f"/proc/self/fd/{number}",
            filename=filename,
            media_type=media_type,
            stat_result=os.fstat(number),
        )
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


@router.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def send_file(
    file_id: str, request: fastapi.Request, api: Api, store: BatchesDep
) -> FileResponse:
    """Send the contents of a file."""
    record = await _found(file_id, request, api, store)
    try:
        file = await asyncio.to_thread(store.files.directory.path(record.id, DATA).open, "rb")
    except FileNotFoundError as error:
        raise _missing(file_id) from error
    return OpenFileResponse(file, record.filename, "application/jsonl")


@router.delete("/v1/files/{file_id}")
async def delete_file(
    file_id: str, request: fastapi.Request, api: Api, store: BatchesDep
) -> dict[str, Any]:
    """Delete a file, unless an unfinished batch reads it."""
    record = await _found(file_id, request, api, store)
    for batch in await asyncio.to_thread(store.records.unfinished):
        if batch.input_file_id == record.id:
            message = f"batch {batch.id} still reads this file; cancel it first, or wait for it."
            raise ApiError(409, message, param="file_id", code="file_in_use")
    await asyncio.to_thread(store.files.delete, record.id, None)
    return {"id": record.id, "object": "file", "deleted": True}


async def _found(file_id: str, request: fastapi.Request, api: Api, store: Batches) -> FileRecord:
    owner = visible_owner(request.scope, api.config.api_key)
    record = await asyncio.to_thread(store.files.get, file_id, owner)
    if record is None:
        raise _missing(file_id)
    return record


def _missing(file_id: str) -> ApiError:
    message = f"there is no file {shown(file_id)} of yours; GET /v1/files lists them."
    return ApiError(404, message, param="file_id", code="not_found")


def _make_room(store: Batches) -> None:
    """Remove abandoned uploads and expired files. Raise ApiError if there are still too many."""
    store.files.directory.sweep()
    if store.files.is_full:
        store.files.seen(None)  # this removes expired files
    if store.files.is_full:
        message = f"there are {MAX_FILES} files already; delete some."
        raise ApiError(413, message, param="file", code="too_many_files")


def _record(form: UploadForm, upload: Upload, owner: str) -> FileRecord:
    """Return the record of an upload. Raise ApiError if the form is incomplete."""
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        raise bad_request(f'purpose must be "batch", got {shown(purpose)}.', "purpose")
    if form.filename is None:
        raise bad_request("file is required; add it.", "file")
    if not upload.num_bytes:
        raise bad_request("file must not be empty.", "file")
    created_at = int(time.time())
    seconds = _lifetime(form.fields)
    return FileRecord(
        id=upload.id,
        bytes=upload.num_bytes,
        created_at=created_at,
        filename=form.filename,
        purpose=purpose,
        owner=owner,
        expires_at=None if seconds is None else created_at + seconds,
    )


def _lifetime(fields: dict[str, str]) -> int | None:
    """Return the lifetime of a file in seconds; None means unlimited."""
    anchor, seconds = fields.get(ANCHOR), fields.get(SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad_request(f'{ANCHOR} must be "created_at", got {shown(anchor)}.', "expires_after")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 9
    if not is_number or not MIN_LIFETIME_S <= int(seconds or 0) <= MAX_LIFETIME_S:
        raise bad_request(
            f"{SECONDS} must be from {MIN_LIFETIME_S} to {MAX_LIFETIME_S}, got {shown(seconds)}.",
            "expires_after",
        )
    return int(seconds or 0)


def _as_json(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }

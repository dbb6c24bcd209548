"""The web page at /ui, and what its live view asks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from octavo.gateway.explanations import not_found
from octavo.gateway.http_errors import FieldError
from octavo.gateway.live_hub import LiveHub
from octavo.gateway.operator_access import OperatorAccess
from octavo.gateway.response_ids import ids_of
from octavo.gateway.scheduler_admin import SchedulerAdmins

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, in memory."""

    content: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """The files of the page by their path below /ui/."""
    return dict(_files_below(files("octavo.gateway") / "ui", ""))


def _files_below(folder: Traversable, prefix: str) -> list[tuple[str, PageFile]]:
    found = []
    for entry in folder.iterdir():
        extension = entry.name.rpartition(".")[2]
        if entry.is_dir():
            found += _files_below(entry, f"{prefix}{entry.name}/")
        elif extension in _MEDIA_TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found.append((prefix + entry.name, PageFile(content, _MEDIA_TYPES[extension], etag)))
    return found


def router(admins: SchedulerAdmins, hub: LiveHub, access: OperatorAccess) -> APIRouter:
    """The routes. Anybody may load the page; what the server holds is shown to operators."""
    routes = APIRouter(include_in_schema=False)
    page = page_files()

    @routes.get("/ui")
    async def to_page() -> Response:
        return RedirectResponse("/ui/", status_code=308)

    @routes.get("/ui/api/stream")
    async def stream(request: Request, pool: str = "") -> Response:
        """`pool`: the group to show; the first without one."""
        access.check(request)
        return StreamingResponse(
            hub.watch(pool),
            media_type="application/octet-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"},
        )

    @routes.get("/ui/api/requests/{request_id:path}/why")
    async def explain_to_operator(request: Request, request_id: str) -> Response:
        access.check(request)
        if explanation := await admins.explain(ids_of(request_id)):
            return Response(explanation, media_type="application/json", headers={"cache-control": "no-store"})
        raise not_found(request_id)

    @routes.get("/ui/{path:path}")
    async def page_file(request: Request, path: str) -> Response:
        file = page.get(path or "index.html")
        if file is None:
            raise FieldError(None, f"/ui/{path} does not exist", "not_found", status=404)
        headers = {**_PAGE_HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return routes

"""Routes that read JSON without its Content-Type, for the APIs of other engines."""

from typing import Any

import fastapi

from quire.serve.bodies.reading import BoundedRoute

CONTENT_TYPE = b"content-type"


class AnyTypeRoute(BoundedRoute):
    """A BoundedRoute that reads JSON whatever the Content-Type is. The documented calls of Ollama
    give none, and then curl sends the type of a form."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def handle_any(request: fastapi.Request) -> fastapi.Response:
            others = [pair for pair in request.scope["headers"] if pair[0] != CONTENT_TYPE]
            request.scope["headers"] = [*others, (CONTENT_TYPE, b"application/json")]
            response: fastapi.Response = await handle(request)
            return response

        return handle_any

"""The first step with a /generate body: check its fields and its sampling parameters."""

import fastapi

from quire.serve.bodies.inner_fields import check_inner
from quire.serve.bodies.open_body import check_neutral
from quire.serve.sglang.protocol import TextsBody


def check_sampling(body: TextsBody, request: fastapi.Request) -> None:
    """Refuse fields that would change the text, and name the unknown sampling parameters in the
    response's header. Raises ApiError."""
    check_neutral(body)
    check_inner(body.sampling_params, "sampling_params", "sampling parameter", request)

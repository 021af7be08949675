"""In which shape an error is answered: as the API has it to whose paths the request came."""

from starlette.responses import Response
from starlette.types import Scope

from quire.serve.api.errors import as_api_error, error_response
from quire.serve.api.messages.errors import is_messages, message_error_response


def error_answer(error: BaseException, scope: Scope) -> Response:
    """Return the answer to a request that fails. An exception that nobody expected goes to the
    log."""
    request_id = str(scope.get("state", {}).get("request_id", ""))
    told = as_api_error(error, request_id)
    if is_messages(scope):
        return message_error_response(told, request_id)
    return error_response(told)

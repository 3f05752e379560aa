"""Errors as OpenAI's API words them: a status, and a body `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
# How engines call what requests give under another name.
_PARAMS = {"max_new_tokens": "max_tokens", "stop": "stop", "prompt": "prompt", "n": "n"}


class ApiError(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: what was given, what is expected.
        param: the field of the request that is wrong.
        code: a word for programs.
        retry_after: seconds after which another attempt may do better.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def outcome(self) -> str:
        """The word for it in the metrics."""
        return {429: "full", 500: "error", 503: "unavailable"}.get(self.status, "refused")

    def response(self) -> Response:
        """The answer."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        # Escaped, for a message may quote half of a surrogate pair, which UTF-8 cannot hold.
        return Response(json.dumps(self.body), self.status, headers, "application/json")


def wrong_field(error: ValidationError) -> ApiError:
    """The first field that a schema does not take."""
    first = error.errors(include_url=False, include_input=False)[0]
    listed = first["type"] in ("unsupported_field", "unknown_field")  # whose message goes on after the path
    path = [*first["loc"], first["ctx"]["field"]] if listed else first["loc"]
    param = ".".join(str(part) for part in path if part != "") or None
    said = first["msg"].removeprefix("Value error, ")
    if param:
        said = f"{param} {said}" if listed else f"{param}: {said}"
    return ApiError(400, said, param, first["type"] if listed else None)


def refused(said: str, prompt_field: str) -> ApiError:
    """What an engine does not take and why, with the field that it came from."""
    word = said.replace("unknown ", "").partition(" ")[0]
    if word.isdigit():  # "9 stop tokens are more than ..."
        word = "stop"
    param = prompt_field if word == "prompt" else _PARAMS.get(word, word if word in ("temperature", "top_p") else None)
    too_long = "max_seq_len=" in said or "the KV cache holds" in said
    code = "context_length_exceeded" if too_long else None
    return ApiError(400, said, param, code)

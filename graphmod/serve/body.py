"""The bodies of requests: their size, their JSON, their schema."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from graphmod.serve.errors import ApiError, wrong_field
from graphmod.serve.schema import _Request

_SECONDS = 60  # for a body to arrive
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
R = TypeVar("R", bound=_Request)


async def _bytes(request: Request, most: int) -> bytes:
    found = bytearray()
    too_large = ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise too_large
    try:
        async with asyncio.timeout(_SECONDS):
            async for part in request.stream():
                found += part
                if len(found) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_SECONDS} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    return bytes(found)


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def read_body(request: Request, kind: type[R], most: int) -> R:
    """The request in a body of at most `most` bytes. Raises ApiError."""
    try:
        raw = await _bytes(request, most)
        given = json.loads(raw.decode("utf-8-sig"), parse_constant=_constant)
        if _SURROGATE.search(raw):
            json.dumps(given, ensure_ascii=False).encode()  # raises for half of a pair, which no tokenizer takes
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "a text in the body has half of a surrogate pair (\\ud800 to \\udfff)") from None
    except ValueError as error:
        digits = "digits" in str(error)  # Python reads no more than some thousand
        raise ApiError(400, "a number has too many digits" if digits else f"the body is not JSON: {error}") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise wrong_field(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None

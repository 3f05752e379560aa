"""HTTP as uvicorn reads it with httptools, which by itself takes headers of any size."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST = 2**16  # bytes
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_BODY = (
    b'{"error": {"message": "the headers are larger than 65,536 bytes", "type": "invalid_request_error", '
    b'"param": null, "code": "headers_too_large"}}'
)


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that goes on to send what is kept and leads to nothing: headers, or trailers after a body, that
    do not end."""

    _kept = 0  # bytes since the last of a body, or the last end of headers or of a request

    def on_headers_complete(self) -> None:
        """Of a request."""
        self._kept = -1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of it."""
        self._kept = -1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Of a request and its body."""
        self._kept = -1
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """What the client has sent."""
        super().data_received(data)
        # What came together with an end may be the beginning of what is next: of that one read no account is taken.
        self._kept = 0 if self._kept < 0 else self._kept + len(data)
        if self._kept > _MOST and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:  # else it would stand in the middle of an answer
                self.transport.write(_REFUSAL % (len(_BODY), _BODY))
            self.transport.close()

"""HTTP as uvicorn reads it with httptools, which by itself takes headers of any size."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST = 2**16  # bytes before a body
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_BODY = (
    b'{"error": {"message": "the headers are larger than 65,536 bytes", "type": "invalid_request_error", '
    b'"param": null, "code": "headers_too_large"}}'
)


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose headers do not end. What came in one read with their end is taken."""

    _in_headers, _heads, _held = True, 0, 0

    def on_headers_complete(self) -> None:
        """Of a request."""
        self._in_headers, self._held, self._heads = False, 0, self._heads + 1
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Of a request and its body."""
        self._in_headers = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """What the client has sent."""
        heads, began_in_headers = self._heads, self._in_headers
        super().data_received(data)
        if began_in_headers and heads == self._heads and not self.transport.is_closing():
            self._held += len(data)
            if self._held > _MOST:
                self.transport.write(_REFUSAL % (len(_BODY), _BODY))
                self.transport.close()

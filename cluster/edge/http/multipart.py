"""Reads a body of multipart/form-data as it arrives, whatever its size. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

from tidemill.workers.messages import RequestError

HEAD_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Part:
    """The head of a part."""

    name: str
    filename: str | None


class MultipartReader:
    """Splits a body into its parts."""

    def __init__(self, content_type: str) -> None:
        """Raises RequestError if it is that of no form."""
        head = Message()
        head["content-type"] = content_type
        boundary = head.get_boundary()
        if head.get_content_type() != "multipart/form-data" or not boundary:
            raise RequestError("send a form: `content-type: multipart/form-data` with a boundary", status=415)
        self._delimiter = b"\r\n--" + boundary.encode(errors="replace")
        self._left = b"\r\n"
        self._part: Part | None = None
        self.has_ended = False

    def feed(self, piece: bytes) -> Iterator[tuple[Part, bytes]]:
        """Yield the pieces of parts that another piece of the body completes. Raises RequestError."""
        if self.has_ended:
            return  # what follows a form is no part of it
        self._left += piece
        while not self.has_ended:
            at = self._left.find(self._delimiter)
            end = at if at >= 0 else max(0, len(self._left) - len(self._delimiter) + 1)
            if self._part is not None and end:
                yield self._part, self._left[:end]
            self._left = self._left[end:]
            if at < 0 or not self._begin_part():
                return
            if self._part is not None:
                yield self._part, b""  # a part may be empty

    def _begin_part(self) -> bool:
        """Read the head behind a delimiter; return whether all of it is there."""
        rest = self._left[len(self._delimiter) :]
        self.has_ended = rest.startswith(b"--")
        head, separator, body = rest.partition(b"\r\n\r\n")
        if self.has_ended or not separator:
            if not self.has_ended and len(rest) > HEAD_BYTES_MAX:
                raise RequestError(f"the head of a part has more than {HEAD_BYTES_MAX} bytes")
            return False
        headers = BytesHeaderParser().parsebytes(head.removeprefix(b"\r\n"))
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise RequestError("a part of the form has no name")
        self._part, self._left = Part(name, headers.get_filename()), body
        return True

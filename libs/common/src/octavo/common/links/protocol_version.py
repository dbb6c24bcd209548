"""Which versions of the protocol two ends of a link speak, told by each before anything else.

A version counts up when a message of proto/octavo/v1 changes so that an older end would misread it; fields that an
older end may ignore need no new one. A release goes on to speak the version before, so that services are replaced
one after another.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

from octavo.common.errors import ProtocolVersionError

OLDEST, NEWEST = 1, 1
METADATA_KEY = "octavo-protocol"
"""Of the client's metadata on a gRPC stream."""
_MAGIC = b"octavo/"
_RANGE = struct.Struct("<HH")


@dataclass(frozen=True, slots=True)
class SpokenVersions:
    """What one end tells of itself."""

    oldest: int
    newest: int
    release: str

    def to_bytes(self) -> bytes:
        """The first frame of a link."""
        return _MAGIC + _RANGE.pack(self.oldest, self.newest) + self.release.encode()

    def to_text(self) -> str:
        """The value of `METADATA_KEY`."""
        return f"{self.oldest} {self.newest} {self.release}"

    def agree(self, other: SpokenVersions) -> int:
        """The newest that both speak. Raises ProtocolVersionError if there is none."""
        newest = min(self.newest, other.newest)
        if newest < max(self.oldest, other.oldest):
            raise ProtocolVersionError(f"no common protocol version: {self} here, {other} at the other end")
        return newest

    def __str__(self) -> str:
        spoken = str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return f"octavo {self.release} speaks {spoken}"


@cache
def ours() -> SpokenVersions:
    return SpokenVersions(OLDEST, NEWEST, version("octavo-common"))


def from_bytes(frame: bytes) -> SpokenVersions:
    """Raises ProtocolVersionError if the frame is none of `to_bytes`."""
    begin = len(_MAGIC) + _RANGE.size
    if not frame.startswith(_MAGIC) or len(frame) < begin:
        raise ProtocolVersionError(f"the other end does not tell its protocol version; {ours()}")
    oldest, newest = _RANGE.unpack_from(frame, len(_MAGIC))
    return SpokenVersions(oldest, newest, frame[begin : begin + 64].decode(errors="replace"))


def from_text(value: str) -> SpokenVersions:
    """Raises ProtocolVersionError if the text is none of `to_text`."""
    try:
        oldest, newest, release = value.split(" ", 2)
        return SpokenVersions(int(oldest), int(newest), release[:64])
    except ValueError:
        raise ProtocolVersionError(f"the other end does not tell its protocol version; {ours()}") from None

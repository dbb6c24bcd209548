"""Links: ordered message streams between two services, over interchangeable carriers.

    frames://PATH            length-prefixed protobuf over a Unix socket: the default on one host
    grpc://HOST:PORT         a gRPC bidirectional stream: between hosts; with `TlsFiles`, mutual TLS
    grpc+unix://PATH         the same over a Unix socket

`connect` and `listen` choose the carrier by address. `local_pair` joins two cores of one process.
"""

from octavo.common.links.address import Address
from octavo.common.links.channel import open_channel
from octavo.common.links.link import Link, StreamCodec
from octavo.common.links.local import local_pair
from octavo.common.links.open import Listener, connect, listen
from octavo.common.links.tls import TlsFiles

__all__ = [
    "Address",
    "Link",
    "Listener",
    "StreamCodec",
    "TlsFiles",
    "connect",
    "listen",
    "local_pair",
    "open_channel",
]

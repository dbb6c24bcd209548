"""Mutual TLS for gRPC over TCP: each end shows a certificate of one private CA for its role. Unix sockets need none."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one service. Listeners read them at every handshake, clients at every connect, so that certificates
    can be renewed in place."""

    ca: Path
    """Certificates of which one must have signed what the other end shows."""
    cert: Path
    """This service's own, for its role, followed by any between it and the CA."""
    key: Path
    """Its private key, not encrypted."""

    def check(self) -> None:
        """Raises ValueError if a file is missing or no PEM, or the key is not the certificate's."""
        check_ca(self.ca)
        check_certificate(self.cert, self.key)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError if a file cannot be read."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server that turns away whoever shows no certificate. Raises OSError if a file cannot be read."""
        last = self._server_certificate()

        def renewed() -> grpc.ServerCertificateConfiguration:
            """Called by a thread of gRPC before each handshake."""
            nonlocal last
            try:
                self.check()
                last = self._server_certificate()
            except (OSError, ValueError) as error:
                log.warning("certificate not renewed", error=str(error))
            return last

        return grpc.dynamic_ssl_server_credentials(last, renewed, require_client_authentication=True)

    def _server_certificate(self) -> grpc.ServerCertificateConfiguration:
        own = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([own], self.ca.read_bytes())


def check_ca(ca: Path) -> None:
    """Raises ValueError that names the file if it holds no certificate."""
    try:
        ssl.create_default_context().load_verify_locations(ca)
    except OSError as error:
        raise ValueError(f"{ca} is no certificate of a CA: {error}") from error


def check_certificate(cert: Path, key: Path) -> None:
    """Raises ValueError that names the files if they are no PEM, or the key is not the certificate's."""
    try:
        ssl.create_default_context().load_cert_chain(cert, key, password=lambda: b"")
    except OSError as error:
        raise ValueError(f"{cert} and {key} are no certificate and its key: {error}") from error

"""Certificates of a deployment's CA, and of another one."""

from __future__ import annotations

from pathlib import Path

from octavo.cli import certificates
from octavo.common.links import TlsFiles


def make_ca(folder: Path) -> Path:
    """A new CA's folder, in which `issue` finds it."""
    certificates.make_ca(folder, days=1)
    return folder


def issue(folder: Path, name: str, *hosts: str) -> TlsFiles:
    """Files of a service of that CA; a second time they are renewed."""
    certificate, key = certificates.issue(folder, name, hosts or ["localhost", "127.0.0.1"], days=1)
    return TlsFiles(folder / "ca.pem", certificate, key)

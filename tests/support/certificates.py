"""Certificates of a deployment's CA, and of another one."""

from __future__ import annotations

from pathlib import Path

from octavo.cli import certificates
from octavo.common.links import TlsFiles
from octavo.common.roles import Role


def make_ca(folder: Path) -> Path:
    """A new CA's folder, in which `issue` finds it."""
    certificates.make_ca(folder, days=1)
    return folder


def issue(folder: Path, role: Role) -> TlsFiles:
    """Files of that CA for a role; a second time they are renewed."""
    certificate, key = certificates.issue(folder, role, [role.certificate_name], days=1)
    return TlsFiles(folder / "ca.pem", certificate, key)

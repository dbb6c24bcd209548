"""A certificate authority for mutual TLS between services. Its key lies in a file: for development, or for a deployment
whose operator keeps that file apart."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CA, _KEY = "ca", "-key"
_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_CLOCK_SKEW = timedelta(minutes=5)


class CertificateError(Exception):
    """A certificate cannot be made. The message says why."""


def make_ca(folder: Path, days: int) -> tuple[Path, Path]:
    """Write ca.pem and ca-key.pem. Raises CertificateError if there is a CA already, or the folder is not writable."""
    certificate_file, key_file = _files(folder, _CA)
    if certificate_file.exists() or key_file.exists():
        raise CertificateError(f"{folder} has a CA already; certificates of a second one would not fit its own")
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Octavo services")
    usage = _key_usage(signs_certificates=True)
    builder = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _write(folder, _CA, builder.sign(key, hashes.SHA256()), key)


def issue(folder: Path, name: str, names: Sequence[str], days: int) -> tuple[Path, Path]:
    """Write NAME.pem and NAME-key.pem, signed by the folder's CA; again: renewed, in place.

    `names` are the DNS names, those of roles among them, and IP addresses that it is for. Raises CertificateError.
    """
    if not _SERVICE.fullmatch(name) or name == _CA or name.endswith(_KEY):
        raise CertificateError(f"{name!r} is no name of a service")
    ca, ca_key = _read_ca(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(_name(name), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([_general_name(one) for one in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    return _write(folder, name, builder.sign(ca_key, hashes.SHA256()), key)


def _read_ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_file, key_file = _files(folder, _CA)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise CertificateError(
            f"{folder} has no CA that can be read: {error}. octavo certs make-ca makes one"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{key_file} is not a key that octavo certs make-ca has made")
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
    except ValueError as error:
        raise CertificateError(f"{text!r} cannot be a certificate's name: {error}") from error


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise CertificateError(f"{host!r} is no host name: {error}") from error


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}{_KEY}.pem"


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    """The key's file is for its owner only from the first byte."""
    certificate_file, key_file = _files(folder, name)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(key_file, private, 0o600)
        _replace(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    except OSError as error:
        raise CertificateError(f"cannot write to {folder}: {error}") from error
    return certificate_file, key_file


def _replace(path: Path, content: bytes, mode: int) -> None:
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    unfinished.replace(path)

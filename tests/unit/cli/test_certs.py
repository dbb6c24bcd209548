"""`octavo certs`: files that TLS libraries accept, their keys for the owner's eyes only."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.common.links import TlsFiles


def octavo(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def names_in(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return names.get_values_for_type(x509.DNSName) + addresses


@pytest.mark.parametrize(("arguments", "names"), [
    (["worker"], ["worker.octavo.internal"]),
    (["gateway-2", "--role", "gateway"], ["gateway.octavo.internal"]),
    (["me", "--role", "operator", "--host", "10.0.0.7"], ["operator.octavo.internal", "10.0.0.7"]),
    (["front", "--host", "api.example", "--host", "10.0.0.7"], ["api.example", "10.0.0.7"]),
    (["redis"], ["redis", "localhost", "127.0.0.1", "::1"]),
])  # fmt: skip
def test_an_issued_certificate_is_for_its_role_or_hosts_and_signed_by_the_ca(
    tmp_path: Path, arguments: list[str], names: list[str]
) -> None:
    octavo("certs", "make-ca", tmp_path)
    octavo("certs", "issue", tmp_path, *arguments, "--days", 30)
    certificate, key = tmp_path / f"{arguments[0]}.pem", tmp_path / f"{arguments[0]}-key.pem"
    TlsFiles(tmp_path / "ca.pem", certificate, key).check()
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    leaf = x509.load_pem_x509_certificate(certificate.read_bytes())
    leaf.verify_directly_issued_by(ca)
    assert names_in(leaf) == names
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days == 30
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    octavo("certs", "make-ca", tmp_path / "new")
    octavo("certs", "issue", tmp_path / "new", "gateway")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "gateway.pem": 0o644, "gateway-key.pem": 0o600}


def test_a_ca_is_not_overwritten_and_a_certificate_is_renewed(tmp_path: Path) -> None:
    octavo("certs", "make-ca", tmp_path)
    assert "has a CA already" in refusal("certs", "make-ca", tmp_path)
    octavo("certs", "issue", tmp_path, "scheduler")
    before = (tmp_path / "scheduler.pem").read_bytes()
    octavo("certs", "issue", tmp_path, "scheduler")
    assert (tmp_path / "scheduler.pem").read_bytes() != before
    TlsFiles(tmp_path / "ca.pem", tmp_path / "scheduler.pem", tmp_path / "scheduler-key.pem").check()


@pytest.mark.parametrize("name", ["ca", "ca-key", "../worker", "a/b", "", ".."])
def test_a_name_cannot_leave_the_folder_nor_replace_the_ca(tmp_path: Path, name: str) -> None:
    octavo("certs", "make-ca", tmp_path)
    files = sorted(tmp_path.rglob("*"))
    assert "is no name" in refusal("certs", "issue", tmp_path, name)
    assert sorted(tmp_path.rglob("*")) == files


def test_without_a_ca_nothing_is_issued(tmp_path: Path) -> None:
    assert "octavo certs make-ca" in refusal("certs", "issue", tmp_path, "worker")


def test_files_that_do_not_belong_together_are_found_out(tmp_path: Path) -> None:
    octavo("certs", "make-ca", tmp_path)
    for name in ("one", "other"):
        octavo("certs", "issue", tmp_path, name)
    with pytest.raises(ValueError, match="no certificate and its key"):
        TlsFiles(tmp_path / "ca.pem", tmp_path / "one.pem", tmp_path / "other-key.pem").check()
    (tmp_path / "bad.pem").write_text("no PEM")
    with pytest.raises(ValueError, match="no certificate of a CA"):
        TlsFiles(tmp_path / "bad.pem", tmp_path / "one.pem", tmp_path / "one-key.pem").check()
    assert ssl.create_default_context(cafile=tmp_path / "ca.pem").cert_store_stats()["x509_ca"] == 1

"""`octavo certs`: certificates for mutual TLS between services."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from octavo.cli.console import Screen
from octavo.common.roles import Role

app = typer.Typer(help="Make certificates for TLS between services.", no_args_is_help=True)


@app.command("make-ca")
def make_ca(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where ca.pem and ca-key.pem are written.")],
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long it is valid.")] = 3650,
) -> None:
    """Make a certificate authority for the services of one deployment. Keep ca-key.pem to yourself."""
    with _certificates() as certificates:
        certificate, key = certificates.make_ca(folder, days)
    typer.echo(f"{certificate}\n{key}")


@app.command("issue")
def issue_certificate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the CA.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Writes NAME.pem and NAME-key.pem there.")],
    role: Annotated[
        Role | None,
        typer.Option(help="What its holder may speak as. Left out: NAME, if that is one.", show_default=False),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|IP",
            help="Of a server that is no service of Octavo; may be repeated. Left out: none with a role, else NAME,"
            " localhost, 127.0.0.1, ::1.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long it is valid.")] = 365,
) -> None:
    """Issue a service's certificate, or renew it in place: running services take the new one by themselves.

    With the role operator it is for `octavo inspect`; without a role for a proxy or Redis, by their host names.
    """
    if role is None and name in list(Role):
        role = Role(name)
    names = [*([role.certificate_name] if role else []), *(host or [])] or [name, "localhost", "127.0.0.1", "::1"]
    with _certificates() as certificates:
        certificate, key = certificates.issue(folder, name, names, days)
    typer.echo(f"{certificate}\n{key}")


@contextmanager
def _certificates() -> Iterator[ModuleType]:
    """What makes them. Tells in one line why one could not be made, and exits with status 1."""
    screen = Screen(Console(stderr=True))
    try:
        from octavo.cli import certificates
    except ImportError:
        command = f"{sys.executable} -m pip install 'octavo-cli[certs]'"
        screen.say(f"certificates need the package cryptography: {command}", style="red")
        raise typer.Exit(1) from None
    try:
        yield certificates
    except certificates.CertificateError as error:
        screen.say(str(error), style="red")
        raise typer.Exit(1) from None

"""`octavo keys`: makes, lists and revokes the API keys that gateways ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from octavo.gateway.api_keys import ApiKey, KeyBook

DEFAULT_FILE = Path("octavo-keys.yaml")

app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        envvar="OCTAVO_GATEWAY_API_KEYS_FILE",
        help=f"The file with keys and tenants. Left out: {DEFAULT_FILE}.",
        show_default=False,
    ),
]
RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis", metavar="URL", envvar="OCTAVO_GATEWAY_API_KEYS_REDIS", help="Keep them in Redis, not in a file."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is. A new tenant is added.")],
    file: FileOption = None,
    redis: RedisOption = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Limit of the tenant.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompt and output tokens together.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests that are open at once.")] = None,
    priority: Annotated[int | None, typer.Option(min=-1000, max=1000, help="Lower is served first.")] = None,
    weight: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Its share beside tenants of equal priority; 1 by default.")
    ] = None,
    operator: Annotated[
        bool | None, typer.Option("--operator/--no-operator", help="May see metrics and the KV cache of all tenants.")
    ] = None,
    note: Annotated[str, typer.Option(help="To know the key by.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it, once: only its hash is kept. Limits that are given change the tenant's."""
    from octavo.gateway.api_keys import Tenant

    given: dict[str, Any] = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "priority": priority,
        "weight": weight,
        "operator": operator,
    }
    made: list[tuple[str, ApiKey]] = []

    def change(book: KeyBook) -> KeyBook:
        known = book.tenants.get(tenant, Tenant())
        update = {name: value for name, value in given.items() if value is not None}
        changed, key = book.with_key(tenant, known.model_copy(update=update), note)
        made[:] = [(key, changed.keys[-1])]
        return changed

    _change(file, redis, change)
    [(key, entry)] = made
    if as_json:
        Console().print_json(data={"key": key, "id": entry.key_id, "tenant": tenant})
    else:
        typer.echo(key)
        typer.echo(f"key {entry.key_id} of {tenant}; it is not shown again", err=True)


@app.command(name="list")
def list_keys(file: FileOption = None, redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Show tenants and the ids of their keys."""
    book = _read(file, redis)
    if as_json:
        told = {
            "tenants": {name: tenant.model_dump() for name, tenant in book.tenants.items()},
            "keys": [{"id": key.key_id, **key.model_dump(mode="json", exclude={"sha256"})} for key in book.keys],
        }
        Console().print_json(data=told)
        return
    tenants = Table("tenant", "requests/min", "tokens/min", "open", "priority", "weight", "operator")
    for name, tenant in book.tenants.items():
        limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_concurrent)
        shown = (str(limit) if limit else "no limit" for limit in limits)
        tenants.add_row(name, *shown, str(tenant.priority), str(tenant.weight), "yes" if tenant.operator else "")
    keys = Table("key", "tenant", "created", "note")
    for key in book.keys:
        keys.add_row(key.key_id, key.tenant, f"{key.created:%Y-%m-%d}" if key.created else "", key.note)
    Console().print(tenants, keys)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id that list shows.")],
    file: FileOption = None,
    redis: RedisOption = None,
) -> None:
    """Take a key out. Gateways refuse it within 2 seconds."""
    _change(file, redis, lambda book: book.without_key(key_id))
    typer.echo(f"key {key_id} is revoked", err=True)


def _change(file: Path | None, redis: str | None, change: Callable[[KeyBook], KeyBook]) -> None:
    from octavo.gateway.key_sources import change_file, change_redis

    with _told():
        if redis is not None:
            change_redis(redis, change)
        else:
            change_file(file or DEFAULT_FILE, change)


def _read(file: Path | None, redis: str | None) -> KeyBook:
    from octavo.gateway.key_sources import read_file, read_redis

    path = file or DEFAULT_FILE
    if redis is None and not path.exists():
        typer.echo(f"there is no {path}; octavo keys create TENANT makes it", err=True)
        raise typer.Exit(1)
    with _told():
        return read_file(path) if redis is None else read_redis(redis)


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong is told in a line."""
    from redis.exceptions import RedisError

    from octavo.gateway.api_keys import KeyBookError

    try:
        yield
    except RedisError as error:
        message = f"Redis cannot be asked: {error} Does it run, and is its URL right (--redis)?"
    except (KeyBookError, OSError) as error:
        message = str(error)
    else:
        return
    typer.echo(f"octavo keys: {message}", err=True)
    raise typer.Exit(1)

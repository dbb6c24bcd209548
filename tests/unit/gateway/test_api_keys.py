"""The book of API keys: what it takes, what it keeps, and who may change it at once."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.gateway.api_keys import KeyBook, KeyBookError, KeyIndex, Tenant, digest
from octavo.gateway.key_sources import FileSource, KeyRing, RedisSource, change_file, change_redis, read_file
from support.redis_server import running_redis


def test_a_key_is_found_and_only_its_hash_is_kept() -> None:
    book, key = KeyBook().with_key("acme", Tenant(requests_per_minute=5), "laptop")
    book, other = book.with_key("acme", book.tenants["acme"])
    index = KeyIndex(KeyBook.parse(book.text()))
    found = index.find(key)
    assert found is not None
    assert (found.tenant, found.note, found.sha256) == ("acme", "laptop", digest(key))
    assert index.book == book
    assert key not in book.text()
    assert key != other
    assert len(key) > 50
    for wrong in ("", key[:-1], key + "a", key.upper(), "\udcff"):
        assert index.find(wrong) is None


def test_a_revoked_key_is_gone_and_others_stay() -> None:
    book, first = KeyBook().with_key("a", Tenant())
    book, second = book.with_key("b", Tenant())
    index = KeyIndex(book.without_key(digest(first)[:12]))
    assert index.find(first) is None
    assert index.find(second) is not None
    with pytest.raises(KeyBookError, match="no key"):
        book.without_key("0" * 12)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tenants: {a: {requests_per_minute: 0}}", "tenants.a.requests_per_minute"),
        ("tenants: {a: {speed: 1}}", "tenants.a.speed"),
        ("tenants: {'a b': {}}", "tenants.a b"),
        ("keys: [{tenant: a, sha256: '" + "0" * 64 + "'}]", "not there: a"),
        ("tenants: {a: {}}\nkeys: [{tenant: a, sha256: sk-secret}]", "keys.0.sha256"),
        ("[", "not YAML"),
        ("3", "valid"),
    ],
)
def test_a_wrong_book_is_refused_by_its_place_and_without_its_values(text: str, place: str) -> None:
    with pytest.raises(KeyBookError, match=place) as raised:
        KeyBook.parse(text)
    assert "sk-secret" not in str(raised.value)


def test_the_command_makes_lists_and_revokes(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    options = ["--file", str(file)]
    run = CliRunner().invoke
    made = run(app, ["keys", "create", "acme", "--requests-per-minute", "9", "--note", "x", "--json", *options])
    assert made.exit_code == 0, made.output
    entry = json.loads(made.stdout)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = run(app, ["keys", "create", "acme", "--max-concurrent", "2", "--weight", "4", *options])
    listed = json.loads(run(app, ["keys", "list", "--json", *options]).stdout)
    assert listed["tenants"]["acme"]["requests_per_minute"] == 9
    assert (listed["tenants"]["acme"]["max_concurrent"], listed["tenants"]["acme"]["weight"]) == (2, 4)
    assert [key["id"] for key in listed["keys"]] == [entry["id"], digest(again.stdout.strip())[:12]]
    assert "9" in run(app, ["keys", "list", *options]).stdout
    assert run(app, ["keys", "revoke", entry["id"], *options]).exit_code == 0
    assert KeyIndex(read_file(file)).find(entry["key"]) is None
    twice = run(app, ["keys", "revoke", entry["id"], *options])
    assert (twice.exit_code, "no key" in twice.output) == (1, True)
    missing = run(app, ["keys", "list", "--file", str(tmp_path / "none.yaml")])
    assert (missing.exit_code, "octavo keys create" in missing.output) == (1, True)
    bad = run(app, ["keys", "create", "a b", *options])
    assert (bad.exit_code, "Traceback" in bad.output) == (1, False)


def test_two_changes_of_a_file_at_once_are_both_there(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    change = [lambda book, n=n: book.with_key(f"t{n}", Tenant())[0] for n in range(8)]
    threads = [threading.Thread(target=change_file, args=(file, one)) for one in change]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_file(file).keys) == 8


async def test_a_ring_follows_its_file_and_outlives_a_wrong_one(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    ring = KeyRing(FileSource(file))
    await ring.reload()
    assert ring.index is None
    book, key = KeyBook().with_key("a", Tenant())
    file.write_text(book.text())
    await ring.reload()
    assert ring.index is not None
    assert ring.index.find(key)
    file.write_text("tenants: [")
    await ring.reload()
    assert ring.index.find(key)
    file.write_text("")
    await ring.reload()
    assert ring.index.find(key) is None


async def test_redis_keeps_a_book_that_is_changed_by_one_after_the_other(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        change = [lambda book, n=n: book.with_key(f"t{n}", Tenant())[0] for n in range(4)]
        await asyncio.gather(*(asyncio.to_thread(change_redis, redis.url, one) for one in change))
        source = RedisSource(redis.url)
        ring = KeyRing(source)
        await ring.reload()
        assert ring.index is not None
        assert set(ring.index.book.tenants) == {"t0", "t1", "t2", "t3"}
        redis.pause()
        await ring.reload()
        assert len(ring.index.book.keys) == 4
        redis.resume()
        await source.close()

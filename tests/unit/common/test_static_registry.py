"""Members that are written down."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from octavo.common.errors import ProtocolError
from octavo.common.registry import Member, StaticRegistry, open_registry
from octavo.common.roles import Role

MEMBER = Member("s0", Role.SCHEDULER, "pool", "frames:///run/s.sock", epoch=3, load={"waiting": 1.0})


async def test_members_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "members.json"
    file.write_text(json.dumps([asdict(MEMBER)]))
    registry = open_registry(f"file://{file}")
    assert await registry.members() == [MEMBER]
    grant = await registry.take_lease(Role.SCHEDULER, "pool", "s0", 1.0, 17)
    assert (grant.epoch, grant.holder_id) == (17, "s0")
    assert await registry.keep_lease(Role.SCHEDULER, "pool", "s0", 1.0, 17)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "not a list of members"),
        ("[1]", "not a list of members"),
        ('[{"role": "king"}]', "not a member"),
        ('[{"member_id": "a", "role": "worker", "pool_id": "p", "address": "http://x"}]', "is not one of"),
        ("[", "cannot be read"),
    ],
)
def test_what_is_no_list_of_members(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "members.yaml"
    file.write_text(text)
    with pytest.raises(ProtocolError, match=problem):
        StaticRegistry.from_file(file)


def test_a_member_survives_the_wire() -> None:
    assert Member.from_json(MEMBER.to_json()) == MEMBER

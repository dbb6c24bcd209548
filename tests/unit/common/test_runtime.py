"""What a service's process is like before it serves."""

from __future__ import annotations

import subprocess
import sys

_SERVICE = """
import resource
from octavo.common import runtime
from octavo.common.service_config import ServiceConfig

resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))

async def serve(stop):
    return resource.getrlimit(resource.RLIMIT_NOFILE)

print(*runtime.run("tested", ServiceConfig(), serve))
"""


def test_a_service_takes_as_many_files_as_it_may_have() -> None:
    program = _SERVICE.format(hard=300)
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["300", "300"]

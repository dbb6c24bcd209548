from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

OCTAVO = """
import signal
from octavo.cli.entry import main

signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def test_ctrl_c_while_the_command_is_still_being_read_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('reading', flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    search_path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", OCTAVO],
        env=os.environ | {"PYTHONPATH": search_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None and command.stdout.readline() == "reading\n"
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=10)

    assert command.returncode == -signal.SIGINT
    assert errors == ""

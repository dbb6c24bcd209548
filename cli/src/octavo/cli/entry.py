"""What the command `octavo` begins with: little, so that Ctrl-C ends it without a traceback however early it comes."""

from __future__ import annotations

import signal


def main() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else whoever started it wants Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli.main import app

    signal.signal(signal.SIGINT, handler)
    app()

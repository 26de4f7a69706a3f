"""The process's own main: from its first moment on, Ctrl-C ends it with one line and 130.

Little may be imported before the handler is there, hence this module of its own.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line and exit."""
    # A shell that starts a command in the background has it ignore SIGINT; that is left alone.
    listening = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listening:
        signal.signal(signal.SIGINT, _quit)
    from kvspan import cli

    try:
        if listening:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = cli.main()
        if listening:  # the interpreter's own end prints tracebacks; all output is out by now
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        _quit()
    sys.exit(status)


def _quit(*_: object) -> None:
    line = "kvspan: interrupted\n"
    if "--json" in sys.argv:
        fields = '"kind": "interrupted", "message": "interrupted", "exit_status": 130'
        line = f'{{"error": {{{fields}}}}}\n'
    try:
        os.write(2, line.encode())
    finally:
        os._exit(130)

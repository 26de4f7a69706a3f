"""The process's own main: from its first moment on, Ctrl-C ends it with one line and 130.

Little may be imported before the handler is there, hence this module of its own, imported for the
command alone. What Python does before it (reading its own modules, site) is out of reach.
"""

from __future__ import annotations

# The built-in half of `signal`: that itself takes 5 ms to import, and Ctrl-C would meet it.
import _signal  # type: ignore[import-not-found]
import os
import sys


def _quit(*_: object) -> None:
    line = "kvspan: interrupted\n"
    if "--json" in sys.argv:
        fields = '"kind": "interrupted", "message": "interrupted", "exit_status": 130'
        line = f'{{"error": {{{fields}}}}}\n'
    try:
        os.write(2, line.encode())
    finally:
        os._exit(130)


# A shell that starts a command in the background has it ignore SIGINT; that is left alone.
_listening = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _listening:
    _signal.signal(_signal.SIGINT, _quit)


def main() -> None:
    """Run the command line and exit."""
    from kvspan import cli

    try:
        if _listening:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        status = cli.main()
        if _listening:  # the interpreter's own end prints tracebacks; all output is out by now
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    except KeyboardInterrupt:
        _quit()
    sys.exit(status)

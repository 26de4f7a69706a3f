"""``kvspan completion``: what a shell needs to complete kvspan's commands, options and files.

The shell asks kvspan itself for every word (argcomplete's protocol), so that nothing it knows can
be out of date; the parser alone is built for that, which takes a tenth of a second.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
  bash: eval "$(kvspan completion bash)"        in ~/.bashrc
  zsh:  eval "$(kvspan completion zsh)"         in ~/.zshrc, after compinit
  fish: kvspan completion fish | source         in ~/.config/fish/config.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to write the script for")


def main(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    import argcomplete

    print(argcomplete.shellcode(["kvspan"], shell=args.shell).strip())
    return 0


def answer(parser_for: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Answer the shell, and end the process. parser_for: the parser for a command line's words."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()[1:]
    # Options are offered once a word starts with a dash: before that, commands and files.
    argcomplete.autocomplete(parser_for(words), always_complete_options=False)

"""The command `phalanx`. A verb is a module: its docstring is the help, `configure` takes a parser, `run` the rest."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from phalanx.commands import dump, report
from phalanx.commands.saying import say

__all__ = ["main"]

_VERBS = {"report": report, "dump": dump}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phalanx", description="Looks at what the processes of a job left behind.")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, module in _VERBS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.configure(verb)
        verb.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    # A box has thousands of records, and none of them is garbage.
    gc.disable()
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough, as `head` has. Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:
        say(f"phalanx: {error}".split("\n"), sys.stderr)
        return 2
    finally:
        gc.enable()
    return status

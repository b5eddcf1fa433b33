"""The command `phalanx`. A verb is a module: its docstring is the help, `configure` takes a parser, `run` the rest."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from phalanx.commands import dump, report

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
    except (OSError, ValueError) as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
    return status

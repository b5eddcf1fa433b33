"""What each op means: its arguments, its signature and its reference semantics.

    barrier all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all
                     one module per op: build functions and `meaning`
    message.py       send and recv
    texts.py         the exchange of texts
    reduction.py     which dtype has which reduce op, and the reference reduction
    moving.py        reading and writing the blocks of a call, for `meaning`
    checks.py        the argument checks that the ops share
    numbers.py       arguments that are numbers
    problems.py      what the native checks found, in words

A build function looks at this rank's arguments only. It raises `InvalidCall` before any peer waits, or returns the
`Call` that a transport runs. `meaning` is the oracle for every transport, bit for bit: given the calls of all ranks in
rank order it reads all inputs first and then writes all outputs, so that in place needs no special care.
"""

from phalanx.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    message,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "message",
    "reduce",
    "reduce_scatter",
    "scatter",
]

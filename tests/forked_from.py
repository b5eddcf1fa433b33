"""The server imports this last (forking.py): it makes itself ready to be forked."""

from __future__ import annotations

import gc

from forking import restore_tunables

restore_tunables()
# What is loaded by now stays. A full collection in a forked process would look at all of torch and copy the pages that
# it lies in, which takes 250 ms.
gc.collect()
gc.freeze()

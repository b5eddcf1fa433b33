"""Importing this keeps the garbage collector from what was loaded before.

A full collection in a forked process looks at all of torch and copies the pages that it lies in: 250 ms.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()

"""The server imports this last (forking.py): it makes itself ready to be forked."""

from __future__ import annotations

import gc
import sys

from forking import restore_environment

restore_environment()
# What is loaded by now stays. A full collection in a forked process would look at all of torch and copy the pages that
# it lies in, which takes 250 ms. Triton, which a build of torch for CUDA loads, would print that its objects were never
# freed.
if "triton._C.libtriton" not in sys.modules:
    gc.collect()
    gc.freeze()

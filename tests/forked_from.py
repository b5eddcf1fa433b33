"""The server imports this last (forking.py): it makes itself ready to be forked."""

from __future__ import annotations

import gc

from forking import restore_environment
from freezing import freeze_loaded

restore_environment()
gc.collect()
freeze_loaded()

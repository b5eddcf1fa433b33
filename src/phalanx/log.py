"""The logger of the package.

What is logged may contain text from a store, a file or a peer, so only printable text goes to handlers.
"""

from __future__ import annotations

import logging

from phalanx.printable import printable_lines

__all__ = ["logger"]

logger = logging.getLogger("phalanx")


class _Printable(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable_lines(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            # Formatters take this text as it is.
            record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
        return True


logger.addFilter(_Printable())

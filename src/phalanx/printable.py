"""Text from elsewhere, made safe for a terminal.

Names of files, functions and groups, texts of exceptions and reports of peers may hold anything. What is not printable
is shown as an escape: control characters, which terminals obey, and letters that turn the direction of what follows.
"""

from __future__ import annotations

__all__ = ["printable", "printable_lines"]


def printable(text: str) -> str:
    """One line."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def printable_lines(text: str) -> str:
    """Any number of lines. Tabs stay."""
    if text.isprintable():
        return text
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")

"""Text that others chose, made safe to show."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, keep: str = "") -> str:
    """The text with control characters written out: names in a checkpoint are anybody's, and a terminal obeys them.

    Args:
        text: What is to be shown.
        keep: Characters to leave as they are, such as line ends.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)

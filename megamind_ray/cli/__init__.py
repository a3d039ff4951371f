"""The command ``megamind``: one file per command group, exit codes and errors in one place."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """As ``app.main``. Ctrl-C is no traceback, either, while the commands are being imported.

    Args:
        argv: Arguments without the program's name; the process's own by default.

    Returns:
        The exit code: 0 done, 1 failed while running, 2 the request was wrong, 130 interrupted.
    """
    try:
        from megamind_ray.cli import app
    except KeyboardInterrupt:
        return 130
    return app.main(argv)

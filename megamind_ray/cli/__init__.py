"""The command ``megamind``: one file per command group, exit codes and errors in one place."""

from megamind_ray.cli.app import main

__all__ = ["main"]

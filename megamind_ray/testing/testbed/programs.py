"""Programs that run in a host: with their output in files, and an end at a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from megamind_ray.errors import ClusterError
from megamind_ray.testing.testbed.processes import group_of

__all__ = ["Program"]

_KILLED_S: Final = 20.0
_AGAIN_S: Final = 0.1
_TAIL_CHARS: Final = 4000


class Program:
    """A program that was started in a host.

    Args:
        command: What enters the host and runs it.
        environment: All of its environment.
        output: Its standard output goes there, its standard error beside it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self._command = list(command)
        self._output, self._errors = output, output.with_suffix(".err")
        with self._output.open("wb") as out, self._errors.open("wb") as err:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What it has written to standard output so far."""
        return self._output.read_text(errors="replace")

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._errors.read_text(errors="replace")

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Waits for its end; -9 is the code of one that was killed.

        Raises:
            ClusterError: It runs longer than that, and was killed; the text ends with what it said.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            said = (self.output + self.errors)[-_TAIL_CHARS:]
            raise ClusterError(f"{self._command[-1]!r:.200} ran longer than {timeout_s:g} s; it said: {said}") from None
        return subprocess.CompletedProcess(self._command, code, self.output, self.errors)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to it and to what it started, unless that made a process group of its own."""
        # Not to what entered the host: it ends as its child does. An orphan would be a matter of the machine's first
        # process, and the host's namespaces would not end before that has taken notice.
        for pid in group_of(self._process.pid):
            if pid != self._process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """Ends it and what it started, now.

        Raises:
            ClusterError: It does not end.
        """
        until_s = time.monotonic() + _KILLED_S
        while self.is_running:
            if time.monotonic() > until_s:
                raise ClusterError(f"process {self._process.pid} is still there {_KILLED_S:g} s after it was killed")
            self.signal(signal.SIGKILL)  # again, where it was only about to enter
            self.resume()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_AGAIN_S)

    def resume(self) -> None:
        """Lets what entered the host go on, which stops when its child does, as in a host that is frozen."""
        self._process.send_signal(signal.SIGCONT)

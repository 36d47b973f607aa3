"""Runs `python ARGUMENTS` so that it dies with the process that started it, whatever kills that one.

    python -m tidemill.cluster.supervisor.die_with_parent PID_OF_PARENT ARGUMENTS...

Becomes the program, which keeps this pid. Linux ends it when the thread that started it ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(parent):  # else it was too late
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell, on purpose

"""Run `python ARGUMENTS` so that it is killed when the process that started it ends, for any
reason.

    python -m tidemill.cluster.processes.system.die_with_parent PID_OF_PARENT ARGUMENTS...

The process becomes the program and keeps its pid. Linux kills it when the thread that started it
ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(parent):  # else the parent ended before prctl took effect
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell, on purpose

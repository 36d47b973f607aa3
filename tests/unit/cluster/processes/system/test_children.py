"""The end of a child is seen in each of its states, and ends are waited for."""

import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from tidemill.cluster.processes.system.children import end, has_ended


def test_end_of_a_child_is_seen_before_and_after_its_status_is_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    try:
        assert not has_ended(process)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process)
        assert child.wait() == -signal.SIGKILL, "its status was read in place of its owner"
    finally:
        child.communicate()
    assert has_ended(process)


def test_end_of_a_child_is_seen_without_file_descriptors() -> None:
    """The watch of a server must not end it when it has no descriptors left."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        while not has_ended(process):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    child.wait()


def test_processes_are_ended_although_one_ends_while_psutil_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux then answers pidfd_open with ENOENT, which psutil 7.2 does not expect."""
    errors, really = [FileNotFoundError()], os.pidfd_open

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if errors:
            raise errors.pop()
        return really(pid, flags)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        psutil.wait_procs([psutil.Process(child.pid)], timeout=0.0)  # it tries pidfd_open once
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        end([psutil.Process(child.pid)], 0.1)
        assert not errors
        assert not psutil.pid_exists(child.pid)

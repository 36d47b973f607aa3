"""Bugs to plant in the worker processes, RPC and the supervisor."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "a restarted router drops a thousand heartbeats",
        "cluster/rpc/channels.py::new_server",
        '("grpc.server.max_pending_requests", $STREAMS_MAX), '
        '("grpc.server.max_pending_requests_hard_limit", $STREAMS_MAX),',
        "",
        "tests/unit/cluster/rpc/test_channels.py",
    ),
    Planted(
        "moving a connection cancels calls in flight",
        "cluster/rpc/router_client.py::_RouterConnection.call",
        "$CHANNEL and not self.$CALLS[$CHANNEL]:",
        "$CHANNEL:",
        "tests/unit/cluster/rpc/test_router_client.py",
    ),
    Planted(
        "a request is blamed forever after its isolated run",
        "cluster/rpc/worker_client.py::_WorkerCall._deliver",
        "elif isinstance($ITEM.$BODY, $TRIAL) or $ITEM.$LAST:",
        "elif $ITEM.$LAST:",
        "tests/unit/cluster/edge/test_isolation_between_workers.py",
    ),
    Planted(
        "a malformed frame counts as a lost worker",
        "cluster/rpc/worker_client.py::_WorkerCall._read",
        "self.$IS_CUT = await self.$LIVES()",
        "self.$IS_CUT = False",
        "tests/unit/cluster/rpc/test_worker_client.py",
    ),
    Planted(
        "one busy sample adds workers",
        "cluster/supervisor/autoscaling.py::_grow",
        "return None # not observed for long enough",
        "pass",
        "tests/unit/cluster/supervisor/test_autoscaling.py",
    ),
    Planted(
        "replicas of a role share one node",
        "cluster/supervisor/node_fit.py::assign",
        "($SAME[$NODE.id], $TOTAL[$NODE.id])",
        "$TOTAL[$NODE.id]",
        "tests/unit/cluster/supervisor/test_node_fit.py",
    ),
    Planted(
        "a worker that ran long waits like one that crashed immediately",
        "cluster/supervisor/restart_backoff.py::Backoff.begin",
        "None or $NOW_S - $BEFORE[1] > $SOON_S else",
        "None else",
        "tests/unit/cluster/router/test_operator_commands.py",
    ),
    Planted(
        "a worker is removed while a request is on its way",
        "cluster/supervisor/scaler.py::Scaler.adjust",
        "if $WORKER.$IDLE_CHECKS >= $IDLE_CHECKS_2:",
        "if $WORKER.$IDLE_CHECKS >= 1:",
        "tests/unit/cluster/supervisor/test_scaler.py",
    ),
    Planted(
        "a draining worker returns to service",
        "cluster/worker/assignment.py::Assignment.draining",
        "return self.$LEAVES or self.$DRAINS",
        "return self.$DRAINS",
        "tests/unit/cluster/router/test_operator_commands.py",
    ),
    Planted(
        "a router learns of removed pages before it learned of them",
        "cluster/worker/heartbeats.py::UnsentAnnouncements.take",
        ": $UNHEARD.$ADDED = ($UNHEARD.$ADDED - {*$NEWS.$REMOVED}) | {*$NEWS.$ADDED",
        ":\n            $UNHEARD.$ADDED = $UNHEARD.$ADDED | {*$NEWS.$ADDED",
        "tests/unit/cluster/worker/test_announcements.py",
    ),
    Planted(
        "an isolated run starts while others wait for their tokens",
        "cluster/worker/server.py::_ServedCall._run.notify",
        "await self.$FLUSH()",
        "await self.sent.wait()",
        "tests/unit/cluster/edge/test_isolation_between_workers.py",
    ),
    Planted(
        "a process that reads a file of a dead server is killed",
        "cluster/supervisor/private_folder.py::_written",
        "if $ENTRY.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:",
        "if True:",
        "tests/unit/cluster/supervisor/test_private_folder.py",
    ),
    Planted(
        "a folder whose files could not all be removed loses its lock",
        "cluster/supervisor/private_folder.py::remove_folder",
        "if not ($FOLDER / FILES).exists():",
        "if True:",
        "tests/unit/cluster/supervisor/test_private_folder.py",
    ),
    Planted(
        "the watch of Ray takes the status of its processes",
        "cluster/supervisor/processes.py::has_ended",
        "os.WEXITED | os.WNOHANG | os.WNOWAIT",
        "os.WEXITED | os.WNOHANG",
        "tests/unit/cluster/supervisor/test_processes.py",
    ),
    Planted(
        "a replaced supervisor acts under a number that is free again",
        "cluster/supervisor/journal.py::Journal.write",
        "if max($NUMBERS) > $NUMBER:",
        "if False:",
        "tests/unit/cluster/supervisor/test_journal.py",
    ),
    Planted(
        "two supervisors write the same entry of the journal",
        "cluster/supervisor/journal.py::Journal.open",
        "self.write($PLAN)",
        "pass",
        "tests/unit/cluster/supervisor/test_journal.py",
    ),
    Planted(
        "a worker is started before the journal has it",
        "cluster/supervisor/scaler.py::Scaler._start",
        "created=False)\n        await self._save()",
        "created=False)",
        "tests/unit/cluster/supervisor/test_journal.py",
    ),
    Planted(
        "a worker is drained before the journal has it as leaving",
        "cluster/supervisor/scaler.py::Scaler._retire",
        "$WORKER.state = Lifecycle.LEAVING\n        await self._save()",
        "$WORKER.state = Lifecycle.LEAVING",
        "tests/unit/cluster/supervisor/test_journal.py",
    ),
    Planted(
        "the entry of a worker is removed before the worker",
        "cluster/supervisor/scaler.py::Scaler._remove",
        "await self._save(always=True)\n        await asyncio.to_thread(self.$CLUSTER.remove_worker, $NAME)\n"
        "        $WORKER = self.$WORKERS.pop($NAME)",
        "$WORKER = self.$WORKERS.pop($NAME)\n        await self._save(always=True)\n"
        "        await asyncio.to_thread(self.$CLUSTER.remove_worker, $NAME)",
        "tests/unit/cluster/supervisor/test_journal.py",
    ),
    Planted(
        "a server removes the folder of a detached one",
        "cluster/supervisor/private_folder.py::_lock_abandoned",
        "return $SERVER is None or not $SERVER.is_running()",
        "return True",
        "tests/unit/cluster/supervisor/test_private_folder.py",
    ),
)

"""Bugs to plant in who is refused and whose turn it is, how many workers there are, and what routers bear."""

from tests.mutations.planted import FLEET, FLOW, UNIT, Planted

ADMISSION = f"{UNIT}/cluster/router/test_admission.py"
SHARES = f"{UNIT}/cluster/router/test_fair_queueing.py"
LENDING = f"{UNIT}/cluster/router/test_server.py"
AUTOSCALE = f"{UNIT}/cluster/supervisor/test_autoscaling.py"
SCALER = f"{UNIT}/cluster/supervisor/test_scaler.py"
ORDERS = f"{UNIT}/cluster/router/test_operator_commands.py"
CHANNELS = f"{UNIT}/cluster/rpc/test_channels.py"
PREFIXES = f"{UNIT}/cluster/router/test_prefix_table.py"
NEWS = f"{UNIT}/cluster/test_news.py"
ROUTERS = f"{UNIT}/cluster/router/test_server.py"

FLEET_WIDE = (
    Planted(
        "a client's own deadline is for the wait alone",
        "cluster/router/admission.py",
        "(wait_s if ask.ttft_s_max is None else predicted_s) > limit_s",
        "wait_s > limit_s",
        ADMISSION,
    ),
    Planted(
        "an idle fleet refuses long prompts for ever",
        "cluster/router/admission.py",
        "(wait_s if ask.ttft_s_max is None else predicted_s) > limit_s",
        "predicted_s > limit_s",
        ADMISSION,
    ),
    Planted(
        "a client may wait longer than the server lets it",
        "cluster/router/admission.py",
        "else min(ask.ttft_s_max, self._ttft_s_max)",
        "else ask.ttft_s_max",
        ADMISSION,
    ),
    Planted(
        "a request that was taken is refused when it comes back",
        "cluster/router/admission.py",
        "        if ask.ttft_s_max == math.inf:\n            return replace(",
        "        if ask.ttft_s_max == -math.inf:\n            return replace(",
        ADMISSION,
    ),
    Planted(
        "one tenant's full queue is everybody's",
        "cluster/router/admission.py",
        " * self._shares.ahead(ask.tenant, work)",
        "",
        ADMISSION,
    ),
    Planted(
        "those refused together come back together",
        "cluster/router/admission.py",
        "* (1.0 + spread)",
        "* 1.5",
        ADMISSION,
    ),
    Planted(
        "the lines of tenants never move on",
        "cluster/router/admission.py",
        "            self._shares.advance(view.queued_tokens_of_all())\n",
        "",
        ADMISSION,
    ),
    Planted(
        "a tenant that was away is owed all that it did not ask for",
        "cluster/router/fair_queueing.py",
        "return max(self._virtual, self._ends.get(tenant, self._virtual))",
        "return self._ends.get(tenant, 0.0)",
        SHARES,
    ),
    Planted(
        "tenants are served in order of arrival",
        "cluster/router/fair_queueing.py",
        "        return self._reached_s(start) - now_s\n",
        "        return 0.0\n",
        SHARES,
    ),
    Planted(
        "tenants are kept for ever",
        "cluster/router/fair_queueing.py",
        "        if len(self._ends) > TENANTS_MAX:\n",
        "        if len(self._ends) > 10**9:\n",
        SHARES,
    ),
    Planted(
        "what others have queued far behind counts as before",
        "cluster/router/fair_queueing.py",
        "(min(end, start + work) for other",
        "(end for other",
        SHARES,
    ),
    Planted(
        "one busy moment makes the fleet larger",
        "cluster/supervisor/autoscaling.py",
        "        return None  # not seen for long enough\n",
        "        pass\n",
        AUTOSCALE,
    ),
    Planted(
        "the fleet goes to and fro",
        "cluster/supervisor/autoscaling.py",
        "if peak > LOW * (load.wanted - 1):",
        "if peak > load.wanted:",
        AUTOSCALE,
    ),
    Planted(
        "a quiet moment makes the fleet smaller",
        "cluster/supervisor/autoscaling.py",
        "if not is_settled or load.wanted <= bound.least:",
        "if load.wanted <= bound.least:",
        AUTOSCALE,
    ),
    Planted(
        "more workers are started while new ones start",
        "cluster/supervisor/autoscaling.py",
        "    if load.ready < load.wanted and now_s",
        "    if load.ready > load.wanted and now_s",
        AUTOSCALE,
    ),
    Planted(
        "there are more workers than allowed",
        "cluster/supervisor/autoscaling.py",
        "count = min(count, max(1, load.wanted) * PER_STEP, bound.most)",
        "count = min(count, max(1, load.wanted) * PER_STEP)",
        AUTOSCALE,
    ),
    Planted(
        "a worker is removed with streams on it",
        "cluster/supervisor/scaler.py",
        " and not (load.running_rows or load.waiting_rows or load.queued_tokens)",
        "",
        SCALER,
    ),
    Planted(
        "a worker is removed with a request on its way to it",
        "cluster/supervisor/scaler.py",
        "worker.idle_looks >= IDLE_LOOKS:",
        "worker.idle_looks >= 1:",
        SCALER,
    ),
    Planted(
        "a worker whose role a person has set is drained",
        "cluster/supervisor/scaler.py",
        " if self._workers[name].started_as == change.role]",
        "]",
        SCALER,
    ),
    Planted(
        "a poison may be asked again at once",
        "cluster/router/quarantine.py",
        "now_s + QUARANTINE_S",
        "now_s",
        ORDERS,
    ),
    Planted(
        "poisons are kept for ever",
        "cluster/router/quarantine.py",
        "while len(self._until_s) > CONTENTS_MAX:",
        "while len(self._until_s) > 10**9:",
        ORDERS,
    ),
    Planted(
        "a connection that moved cuts off what is asked on it",
        "cluster/rpc/router_client.py",
        "if self._channel is not channel and not self._calls[channel]:",
        "if self._channel is not channel:",
        f"{UNIT}/cluster/rpc/test_router_client.py",
    ),
    Planted(
        "a router hears a thousand workers and no more",
        "cluster/router/server.py",
        "new_server(ROUTER_STREAMS_MAX)",
        "new_server()",
        CHANNELS,
    ),
    Planted(
        "a router that begins anew drops a thousand reports",
        "cluster/rpc/channels.py",
        '            ("grpc.server.max_pending_requests", streams_max),\n'
        '            ("grpc.server.max_pending_requests_hard_limit", streams_max),\n',
        "",
        CHANNELS,
    ),
    Planted(
        "what a worker reports and what is booked on it counts twice",
        "cluster/router/fleet_view.py",
        "np.clip(expected[UNSETTLED], least, most)",
        "most",
        FLEET,
    ),
    Planted(
        "a prefix looked up before remembers places that moved",
        "cluster/router/prefix_table.py",
        "self._version += 1\n",
        "pass\n",
        PREFIXES,
    ),
    Planted(
        "a request that a worker died of is tried again",
        "cluster/edge/flow.py",
        "            case CrashedAlone():\n",
        "            case CrashedAlone() if self.attempt > ATTEMPTS_MAX:\n",
        FLOW,
    ),
    Planted(
        "a router hears of pages that went before it heard that they came",
        "cluster/worker/heartbeats.py",
        "(unheard.added - {*news.removed}) | {*news.added}",
        "unheard.added | {*news.added}",
        NEWS,
    ),
    Planted(
        "what one router hears no other one does",
        "cluster/worker/heartbeats.py",
        "        for unheard in self._unheard.values():\n",
        "        for unheard in [one for key, one in self._unheard.items() if key == listener]:\n",
        NEWS,
    ),
    Planted(
        "a lost router is waited for",
        "cluster/rpc/router_client.py",
        "self._at = (at + 1) % len(self._ways)",
        "self._at = at",
        ROUTERS,
    ),
    Planted(
        "any router takes people's words",
        "cluster/rpc/router_client.py",
        "at = 0 if first else self._at",
        "at = self._at",
        ROUTERS,
    ),
    Planted(
        "every router gives orders",
        "cluster/worker/heartbeats.py",
        "        self._heard: Callable[[], None] | None = None\n",
        "        self._heard: Callable[[], None] | None = lambda: None\n",
        ROUTERS,
    ),
    Planted(
        "the budget that another model's router says is not taken",
        "cluster/worker/heartbeats.py",
        "self._takes_budgets = news is None",
        "self._takes_budgets = False",
        LENDING,
    ),
    Planted(
        "a worker is placed on by the router that only lends it memory",
        "cluster/router/server.py",
        "budget_bytes = self._router.budget_for(decode_heartbeat(data))",
        "budget_bytes = self._router.heartbeat(decode_heartbeat(data)).budget_bytes",
        LENDING,
    ),
    Planted(
        "a table says what the broker of another fleet did not",
        "cluster/messages.py",
        "if (said := told.get(one.info.name))",
        "if (said := told.get(one.info.node))",
        LENDING,
    ),
)

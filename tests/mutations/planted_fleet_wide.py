"""Bugs to plant in who is refused and whose turn it is, how many workers there are, and what routers bear."""

from tests.mutations.planted import FLEET, FLOW, UNIT, Planted

ADMISSION = f"{UNIT}/cluster/test_admission.py"
SHARES = f"{UNIT}/cluster/test_shares.py"
LENDING = f"{UNIT}/cluster/test_router_service.py"
AUTOSCALE = f"{UNIT}/cluster/test_autoscale.py"
SCALER = f"{UNIT}/cluster/test_scaler.py"
ORDERS = f"{UNIT}/cluster/test_orders.py"
CHANNELS = f"{UNIT}/cluster/test_channels.py"
PREFIXES = f"{UNIT}/cluster/test_prefixes.py"
NEWS = f"{UNIT}/cluster/test_news.py"
ROUTERS = f"{UNIT}/cluster/test_router_service.py"

FLEET_WIDE = (
    Planted(
        "a client's own deadline is for the wait alone",
        "cluster/admission.py",
        "(wait_s if ask.ttft_s_max is None else predicted_s) > limit_s",
        "wait_s > limit_s",
        ADMISSION,
    ),
    Planted(
        "an idle fleet refuses long prompts for ever",
        "cluster/admission.py",
        "(wait_s if ask.ttft_s_max is None else predicted_s) > limit_s",
        "predicted_s > limit_s",
        ADMISSION,
    ),
    Planted(
        "a client may wait longer than the server lets it",
        "cluster/admission.py",
        "else min(ask.ttft_s_max, self._ttft_s_max)",
        "else ask.ttft_s_max",
        ADMISSION,
    ),
    Planted(
        "a request that was taken is refused when it comes back",
        "cluster/admission.py",
        "        if ask.ttft_s_max == math.inf:\n            return replace(",
        "        if ask.ttft_s_max == -math.inf:\n            return replace(",
        ADMISSION,
    ),
    Planted(
        "one tenant's full queue is everybody's",
        "cluster/admission.py",
        " * self._shares.ahead(ask.tenant, work)",
        "",
        ADMISSION,
    ),
    Planted(
        "those refused together come back together",
        "cluster/admission.py",
        "* (1.0 + spread)",
        "* 1.5",
        ADMISSION,
    ),
    Planted(
        "the lines of tenants never move on",
        "cluster/admission.py",
        "            self._shares.advance(view.queued_tokens_of_all())\n",
        "",
        ADMISSION,
    ),
    Planted(
        "a tenant that was away is owed all that it did not ask for",
        "cluster/shares.py",
        "return max(self._virtual, self._ends.get(tenant, self._virtual))",
        "return self._ends.get(tenant, 0.0)",
        SHARES,
    ),
    Planted(
        "tenants are served in order of arrival",
        "cluster/shares.py",
        "        return self._reached_s(start) - now_s\n",
        "        return 0.0\n",
        SHARES,
    ),
    Planted(
        "tenants are kept for ever",
        "cluster/shares.py",
        "        if len(self._ends) > TENANTS_MAX:\n",
        "        if len(self._ends) > 10**9:\n",
        SHARES,
    ),
    Planted(
        "what others have queued far behind counts as before",
        "cluster/shares.py",
        "(min(end, start + work) for other",
        "(end for other",
        SHARES,
    ),
    Planted(
        "one busy moment makes the fleet larger",
        "cluster/autoscale.py",
        "        return None  # not seen for long enough\n",
        "        pass\n",
        AUTOSCALE,
    ),
    Planted(
        "the fleet goes to and fro",
        "cluster/autoscale.py",
        "if peak > LOW * (load.wanted - 1):",
        "if peak > load.wanted:",
        AUTOSCALE,
    ),
    Planted(
        "a quiet moment makes the fleet smaller",
        "cluster/autoscale.py",
        "if not is_settled or load.wanted <= bound.least:",
        "if load.wanted <= bound.least:",
        AUTOSCALE,
    ),
    Planted(
        "more workers are started while new ones start",
        "cluster/autoscale.py",
        "    if load.ready < load.wanted and now_s",
        "    if load.ready > load.wanted and now_s",
        AUTOSCALE,
    ),
    Planted(
        "there are more workers than allowed",
        "cluster/autoscale.py",
        "count = min(count, max(1, load.wanted) * PER_STEP, bound.most)",
        "count = min(count, max(1, load.wanted) * PER_STEP)",
        AUTOSCALE,
    ),
    Planted(
        "a worker is removed with streams on it",
        "cluster/scaler.py",
        " and not (load.running_rows or load.waiting_rows or load.queued_tokens)",
        "",
        SCALER,
    ),
    Planted(
        "a worker is removed with a request on its way to it",
        "cluster/scaler.py",
        "worker.idle_looks >= IDLE_LOOKS:",
        "worker.idle_looks >= 1:",
        SCALER,
    ),
    Planted(
        "a worker whose role a person has set is drained",
        "cluster/scaler.py",
        " if self._workers[name].started_as == change.role]",
        "]",
        SCALER,
    ),
    Planted(
        "a poison may be asked again at once",
        "cluster/quarantine.py",
        "now_s + QUARANTINE_S",
        "now_s",
        ORDERS,
    ),
    Planted(
        "poisons are kept for ever",
        "cluster/quarantine.py",
        "while len(self._until_s) > CONTENTS_MAX:",
        "while len(self._until_s) > 10**9:",
        ORDERS,
    ),
    Planted(
        "a connection that moved cuts off what is asked on it",
        "cluster/router_client.py",
        "if self._channel is not channel and not self._calls[channel]:",
        "if self._channel is not channel:",
        f"{UNIT}/cluster/test_router_client.py",
    ),
    Planted(
        "a router hears a thousand workers and no more",
        "cluster/router_service.py",
        "new_server(ROUTER_STREAMS_MAX)",
        "new_server()",
        CHANNELS,
    ),
    Planted(
        "a router that begins anew drops a thousand reports",
        "cluster/channels.py",
        '            ("grpc.server.max_pending_requests", streams_max),\n'
        '            ("grpc.server.max_pending_requests_hard_limit", streams_max),\n',
        "",
        CHANNELS,
    ),
    Planted(
        "what a worker reports and what is booked on it counts twice",
        "cluster/fleet.py",
        "np.clip(expected[UNSETTLED], least, most)",
        "most",
        FLEET,
    ),
    Planted(
        "a prefix looked up before remembers places that moved",
        "cluster/prefixes.py",
        "self._version += 1\n",
        "pass\n",
        PREFIXES,
    ),
    Planted(
        "a request that a worker died of is tried again",
        "cluster/flow.py",
        "            case DiedAlone():\n",
        "            case DiedAlone() if self.attempt > ATTEMPTS_MAX:\n",
        FLOW,
    ),
    Planted(
        "a router hears of pages that went before it heard that they came",
        "cluster/heartbeats.py",
        "(unheard.added - {*news.removed}) | {*news.added}",
        "unheard.added | {*news.added}",
        NEWS,
    ),
    Planted(
        "what one router hears no other one does",
        "cluster/heartbeats.py",
        "        for unheard in self._unheard.values():\n",
        "        for unheard in [one for key, one in self._unheard.items() if key == listener]:\n",
        NEWS,
    ),
    Planted(
        "a lost router is waited for",
        "cluster/router_client.py",
        "self._at = (at + 1) % len(self._ways)",
        "self._at = at",
        ROUTERS,
    ),
    Planted(
        "any router takes people's words",
        "cluster/router_client.py",
        "at = 0 if first else self._at",
        "at = self._at",
        ROUTERS,
    ),
    Planted(
        "every router gives orders",
        "cluster/heartbeats.py",
        "        self._heard: Callable[[], None] | None = None\n",
        "        self._heard: Callable[[], None] | None = lambda: None\n",
        ROUTERS,
    ),
    Planted(
        "the budget that another model's router says is not taken",
        "cluster/heartbeats.py",
        "self._takes_budgets = news is None",
        "self._takes_budgets = False",
        LENDING,
    ),
    Planted(
        "a worker is placed on by the router that only lends it memory",
        "cluster/router_service.py",
        "budget_bytes = self._router.budget(decode_heartbeat(data))",
        "budget_bytes = self._router.heartbeat(decode_heartbeat(data)).budget_bytes",
        LENDING,
    ),
    Planted(
        "a table says what the broker of another fleet did not",
        "cluster/service.py",
        "if (said := told.get(one.info.name))",
        "if (said := told.get(one.info.node))",
        LENDING,
    ),
)

"""Bugs to plant in cluster/."""

from tests.mutations.planted import FLOW, ROUTER, UNIT, Planted

ORDERS = f"{UNIT}/cluster/router/test_operator_commands.py"
BETWEEN = f"{UNIT}/cluster/edge/test_isolation_between_workers.py"
WATCH = f"{UNIT}/cluster/edge/test_failure_detector.py"
CUT = f"{UNIT}/cluster/rpc/test_worker_client.py"
NODES = f"{UNIT}/cluster/supervisor/test_node_fit.py"
TRIALS = f"{UNIT}/workers/scheduling/test_isolation.py"
HANDOVER = f"{UNIT}/workers/engine/test_drain.py"

CLUSTER = (
    Planted(
        "streamed tokens are forgotten at a loss",
        "cluster/edge/flow.py",
        "        self.streamed += delta.tokens\n",
        "",
        FLOW,
    ),
    Planted(
        "a retry may write a longer answer",
        "cluster/edge/flow.py",
        "max_new_tokens=self.request.max_new_tokens - len(self.streamed),\n            drawn",
        "max_new_tokens=self.request.max_new_tokens,\n            drawn",
        FLOW,
    ),
    Planted("a lost worker is asked again", "cluster/edge/flow.py", "        self.avoid |= {at}\n", "", FLOW),
    Planted(
        "the decode worker is blamed for the prefill worker",
        "cluster/edge/flow.py",
        "                at = route.prefill\n",
        "",
        FLOW,
    ),
    Planted(
        "patience with an empty store never ends",
        "cluster/edge/flow.py",
        "attempt <= PATIENT_ATTEMPTS and _is_stored",
        "_is_stored",
        FLOW,
    ),
    Planted(
        "pages are insisted on that the store refused",
        "cluster/edge/flow.py",
        " and _is_stored(produced, rest, page_tokens)",
        "",
        FLOW,
    ),
    Planted(
        "the last token is asked for as a page",
        "cluster/edge/flow.py",
        "page_keys(root, rest.tokens[:end], page_tokens)",
        "page_keys(root, rest.tokens, page_tokens)",
        FLOW,
    ),
    Planted(
        "whoever waits for a worker is not woken",
        "cluster/router/router.py",
        "        self._changed.set()",
        "        pass",
        ROUTER,
    ),
)

RESILIENCE = (
    Planted(
        "a planned hand-over counts as a failure",
        "cluster/edge/flow.py",
        "            case HandedOver():\n                self.hand_overs += 1\n",
        "            case HandedOver():\n                self.attempt += 1\n",
        FLOW,
    ),
    Planted(
        "nothing goes on trial after a loss",
        "cluster/edge/flow.py",
        "                self.on_trial = True\n",
        "",
        FLOW,
    ),
    Planted(
        "nobody hears whom a worker died of",
        "cluster/edge/flow.py",
        "await router.report_lost(at, self.content)",
        "await router.report_lost(at)",
        FLOW,
    ),
    Planted(
        "the seed makes a poison another one",
        "cluster/edge/flow.py",
        "replace(request.sampling, seed=0)",
        "(request.sampling, request.request_id)",
        FLOW,
    ),
    Planted(
        "a suspect's caller is not told before it runs",
        "workers/scheduling/isolation.py",
        "        if self._now.request.on_trial and not self._now.alone:\n",
        "        if self._now.request.on_trial and not self._now.is_being_told:\n",
        TRIALS,
    ),
    Planted(
        "others run before a caller knows that the trial is over",
        "workers/scheduling/isolation.py",
        "            return False  # its caller does not know yet\n",
        "            return True\n",
        TRIALS,
    ),
    Planted(
        "others run while a suspect's caller is being told that it is alone",
        "workers/scheduling/isolation.py",
        "        if now.alone or now.is_notifying:\n",
        "        if now.alone:\n",
        TRIALS,
    ),
    Planted(
        "a suspect that loses its memory as its trial begins is waited for for ever",
        "workers/engine/engine.py",
        """                sequence.is_notifying = False
                self._work.set()
""",
        "",
        TRIALS,
    ),
    Planted(
        "a trial begins while others wait for what they drew",
        "cluster/worker/server.py",
        "            await self._flush()\n",
        "            await self.sent.wait()\n",
        BETWEEN,
    ),
    Planted(
        "suspects go one after the other while all others wait",
        "workers/scheduling/isolation.py",
        "(self._others_first and others)",
        "False",
        TRIALS,
    ),
    Planted(
        "an answer ends before the trial is over",
        "workers/engine/engine.py",
        "            if item.finish is not None:\n                await self._tell(",
        "            if item.finish is not None and sequence.produces:\n                await self._tell(",
        TRIALS,
    ),
    Planted(
        "a trial ends with the first token",
        "workers/engine/intake.py",
        "target - 1 + min(TRIAL_TOKENS, request.max_new_tokens)",
        "target",
        TRIALS,
    ),
    Planted(
        "a call is blamed for ever after its trial",
        "cluster/rpc/worker_client.py",
        "        elif isinstance(item.body, Trial) or item.last:\n",
        "        elif item.last:\n",
        BETWEEN,
    ),
    Planted(
        "a hand-over arrives as a loss",
        "cluster/rpc/worker_codec.py",
        "        return HandedOver(message.message)\n",
        "        return WorkerGone(message.message)\n",
        BETWEEN,
    ),
    Planted(
        "a stream is handed over before it can be resumed",
        "workers/engine/drain.py",
        "        return sequence.publication.task is None\n",
        "        return True\n",
        HANDOVER,
    ),
    Planted(
        "no checkpoint is kept where a stream is handed over",
        "workers/engine/drain.py",
        "            sequence.cuts.add(place)\n",
        "",
        HANDOVER,
    ),
    Planted(
        "guesses run past the place of a hand-over",
        "workers/scheduling/scheduler.py",
        " and (self._limits.roll_pages or sequence.next_cut is not None)",
        " and self._limits.roll_pages",
        HANDOVER,
    ),
    Planted(
        "requests that wait are handed over when their turn comes",
        "workers/engine/engine.py",
        "                sequence.timeout.reschedule(_now_s())\n",
        "                pass\n",
        HANDOVER,
    ),
    Planted(
        "a worker that leaves is called back",
        "cluster/worker/assignment.py",
        "return self.leaves or self._drains",
        "return self._drains",
        ORDERS,
    ),
    Planted(
        "a router that begins anew undoes drains",
        "cluster/router/operator_commands.py",
        "        if is_new and draining:\n            self._drained[info.name] = info.worker\n",
        "",
        ORDERS,
    ),
    Planted(
        "two workers that need each other can both be drained",
        "cluster/router/operator_commands.py",
        "other is info or member.draining or self._is_drained(other)",
        "other is info",
        ORDERS,
    ),
    Planted(
        "a young router calls everybody out",
        "cluster/router/router.py",
        "        if self._began_s >= since_s:\n            return frozenset()\n",
        "",
        ORDERS,
    ),
    Planted(
        "a worker that speaks is given up",
        "cluster/edge/failure_detector.py",
        "out & peers.silent()",
        "out",
        WATCH,
    ),
    Planted(
        "a life that lived waits like one that died",
        "cluster/supervisor/restart_backoff.py",
        "before is None or now_s - before[1] > SOON_S",
        "before is None",
        ORDERS,
    ),
    Planted(
        "a bad line is taken for a death",
        "cluster/rpc/worker_client.py",
        "self._is_cut = await self._lives()",
        "self._is_cut = False",
        CUT,
    ),
    Planted(
        "a death is taken for a bad line",
        "cluster/rpc/worker_client.py",
        "self._is_cut = await self._lives()",
        "self._is_cut = True",
        CUT,
    ),
    Planted(
        "replicas of a role gather on one node",
        "cluster/supervisor/node_fit.py",
        "(same[node.id], taken[node.id])",
        "taken[node.id]",
        NODES,
    ),
    Planted(
        "a group goes where there is a place for one of its ranks",
        "cluster/supervisor/node_fit.py",
        "amount * self.ranks for",
        "amount for",
        NODES,
    ),
    Planted(
        "a place is given twice",
        "cluster/supervisor/node_fit.py",
        "        left[home.id] = home.without(demand)\n",
        "",
        NODES,
    ),
)

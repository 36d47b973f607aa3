"""Bugs to plant in cluster/."""

from tests.mutations.planted import FLOW, ROUTER, UNIT, Planted

ORDERS = f"{UNIT}/cluster/test_orders.py"
BETWEEN = f"{UNIT}/cluster/test_trials_between.py"
WATCH = f"{UNIT}/cluster/test_watch.py"
TRIALS = f"{UNIT}/workers/test_trials.py"
HANDOVER = f"{UNIT}/workers/test_handover.py"

CLUSTER = (
    Planted(
        "streamed tokens are forgotten at a loss",
        "cluster/flow.py",
        "        self.streamed += delta.tokens\n",
        "",
        FLOW,
    ),
    Planted(
        "a retry may write a longer answer",
        "cluster/flow.py",
        "max_new_tokens=self.request.max_new_tokens - len(self.streamed),\n            drawn",
        "max_new_tokens=self.request.max_new_tokens,\n            drawn",
        FLOW,
    ),
    Planted("a lost worker is asked again", "cluster/flow.py", "        self.avoid |= {at}\n", "", FLOW),
    Planted(
        "the decode worker is blamed for the prefill worker",
        "cluster/flow.py",
        "                at = route.prefill\n",
        "",
        FLOW,
    ),
    Planted(
        "patience with an empty store never ends",
        "cluster/flow.py",
        "attempt <= PATIENT_ATTEMPTS and _is_stored",
        "_is_stored",
        FLOW,
    ),
    Planted(
        "pages are insisted on that the store refused",
        "cluster/flow.py",
        " and _is_stored(produced, rest, page_tokens)",
        "",
        FLOW,
    ),
    Planted(
        "the last token is asked for as a page",
        "cluster/flow.py",
        "page_keys(root, rest.tokens[:end], page_tokens)",
        "page_keys(root, rest.tokens, page_tokens)",
        FLOW,
    ),
    Planted(
        "whoever waits for a worker is not woken",
        "cluster/router.py",
        "        self._changed.set()",
        "        pass",
        ROUTER,
    ),
)

RESILIENCE = (
    Planted(
        "a planned hand-over counts as a failure",
        "cluster/flow.py",
        "            case HandedOver():\n                self.hand_overs += 1\n",
        "            case HandedOver():\n                self.attempt += 1\n",
        FLOW,
    ),
    Planted(
        "nothing goes on trial after a loss",
        "cluster/flow.py",
        "                self.on_trial = True\n",
        "",
        FLOW,
    ),
    Planted(
        "nobody hears whom a worker died of",
        "cluster/flow.py",
        "await router.lost(at, self.content)",
        "await router.lost(at)",
        FLOW,
    ),
    Planted(
        "the seed makes a poison another one",
        "cluster/flow.py",
        "replace(request.sampling, seed=0)",
        "(request.sampling, request.request_id)",
        FLOW,
    ),
    Planted(
        "a suspect's caller is not told before it runs",
        "workers/trials.py",
        "        if self._now.request.on_trial and not self._now.alone:\n",
        "        if self._now.request.on_trial and not self._now.is_being_told:\n",
        TRIALS,
    ),
    Planted(
        "others run before a caller knows that the trial is over",
        "workers/trials.py",
        "            return False  # its caller does not know yet\n",
        "            return True\n",
        TRIALS,
    ),
    Planted(
        "others run while a suspect's caller is being told that it is alone",
        "workers/trials.py",
        "        if now.alone or now.is_being_told:\n",
        "        if now.alone:\n",
        TRIALS,
    ),
    Planted(
        "a suspect that loses its memory as its trial begins is waited for for ever",
        "workers/engine.py",
        "                sequence.is_being_told = False\n                self._work.set()\n",
        "",
        TRIALS,
    ),
    Planted(
        "a trial begins while others wait for what they drew",
        "cluster/data_plane.py",
        "            await self._flush()\n",
        "            await self.sent.wait()\n",
        BETWEEN,
    ),
    Planted(
        "suspects go one after the other while all others wait",
        "workers/trials.py",
        "(self._others_first and others)",
        "False",
        TRIALS,
    ),
    Planted(
        "an answer ends before the trial is over",
        "workers/engine.py",
        "            if item.finish is not None:\n                await self._tell(",
        "            if item.finish is not None and sequence.produces:\n                await self._tell(",
        TRIALS,
    ),
    Planted(
        "a trial ends with the first token",
        "workers/arrivals.py",
        "target - 1 + min(TRIAL_TOKENS, request.max_new_tokens)",
        "target",
        TRIALS,
    ),
    Planted(
        "a call is blamed for ever after its trial",
        "cluster/peers.py",
        "        elif isinstance(item.body, Trial) or item.last:\n",
        "        elif item.last:\n",
        BETWEEN,
    ),
    Planted(
        "a hand-over arrives as a loss",
        "cluster/codec.py",
        "        return HandedOver(message.message)\n",
        "        return WorkerGone(message.message)\n",
        BETWEEN,
    ),
    Planted(
        "a stream is handed over before it can be resumed",
        "workers/handover.py",
        "        return sequence.publication.task is None\n",
        "        return True\n",
        HANDOVER,
    ),
    Planted(
        "no checkpoint is kept where a stream is handed over",
        "workers/handover.py",
        "            sequence.cuts.add(place)\n",
        "",
        HANDOVER,
    ),
    Planted(
        "guesses run past the place of a hand-over",
        "workers/schedule.py",
        " and (self._limits.roll_pages or sequence.next_cut is not None)",
        " and self._limits.roll_pages",
        HANDOVER,
    ),
    Planted(
        "requests that wait are handed over when their turn comes",
        "workers/engine.py",
        "                sequence.patience.reschedule(_now_s())\n",
        "                pass\n",
        HANDOVER,
    ),
    Planted(
        "a worker that leaves is called back",
        "cluster/duties.py",
        "return self.leaves or self._drains",
        "return self._drains",
        ORDERS,
    ),
    Planted(
        "a router that begins anew undoes drains",
        "cluster/orders.py",
        "        if is_new and draining:\n            self._drained[info.name] = info.worker\n",
        "",
        ORDERS,
    ),
    Planted(
        "two workers that need each other can both be drained",
        "cluster/orders.py",
        "other is info or member.draining or self._is_drained(other)",
        "other is info",
        ORDERS,
    ),
    Planted(
        "a young router calls everybody out",
        "cluster/router.py",
        "        if self._began_s >= since_s:\n            return frozenset()\n",
        "",
        ORDERS,
    ),
    Planted(
        "a worker that speaks is given up",
        "cluster/watch.py",
        "out & peers.silent()",
        "out",
        WATCH,
    ),
    Planted(
        "a life that lived waits like one that died",
        "cluster/backoff.py",
        "before is None or now_s - before[1] > SOON_S",
        "before is None",
        ORDERS,
    ),
)

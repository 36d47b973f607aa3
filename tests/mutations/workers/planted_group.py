"""Bugs to plant in tensor-parallel groups: what leader and ranks tell each other, and how a group ends."""

from tests.mutations.planted import UNIT, Planted

FRAMES = f"{UNIT}/workers/parallel/test_frames.py"
LINK = f"{UNIT}/workers/parallel/test_link.py"
GROUP = f"{UNIT}/workers/parallel/test_group.py"

GROUP_BUGS = (
    Planted(
        "a rank takes guesses for known tokens",
        "workers/parallel/frames.py",
        "        drafts=drafts,",
        "        drafts=0,",
        FRAMES,
    ),
    Planted(
        "the first state is none",
        "workers/parallel/frames.py",
        "None if read == NONE else StateId(read)",
        "StateId(read) if read > 0 else None",
        FRAMES,
    ),
    Planted(
        "a cancelled transfer leaves a rank writing to memory that is given back",
        "workers/parallel/group.py",
        "await finish(asyncio.wrap_future(self._link.ask(verb, encode_objects(objects))))",
        "await asyncio.wrap_future(self._link.ask(verb, encode_objects(objects)))",
        LINK,
    ),
    Planted(
        "an extent stays mapped on the ranks that were granted it",
        "workers/parallel/group.py",
        """        for link in granted:
            link.send(Verb.UNMAP, ints((offset_bytes, num_bytes)))
""",
        "",
        LINK,
    ),
    Planted(
        "an extent is used that a rank was refused",
        "workers/parallel/group.py",
        "if refused is None and len(granted) == len(self._links):",
        "if refused is None:",
        LINK,
    ),
    Planted(
        "the ranks wait for a step that the leader has called off",
        "workers/parallel/group.py",
        "        finally:\n            self._group.ranks.broadcast(told_T)\n",
        "        finally:\n            pass\n        self._group.ranks.broadcast(told_T)\n",
        GROUP,
    ),
    Planted(
        "a rank runs a step that the leader has called off",
        "workers/engine/build_rank.py",
        "return None if NONE in told else told",
        "return told",
        GROUP,
    ),
    Planted(
        "a leader that breaks leaves its ranks waiting",
        "workers/parallel/group.py",
        "            self._group.links.end(reason)\n            raise GroupBroken(reason) from error",
        "            raise",
        GROUP,
    ),
    Planted(
        "the others outlive a rank that was lost",
        "workers/parallel/link.py",
        "            self._broken.set_exception(GroupBroken(reason))\n        self._close()",
        "            self._broken.set_exception(GroupBroken(reason))",
        LINK,
    ),
    Planted(
        "what was asked of a lost rank is never answered",
        "workers/parallel/link.py",
        "            self._reason = reason\n            self._fail_all()",
        "            self._reason = reason",
        LINK,
    ),
    Planted(
        "a rank that is being built outlives its leader",
        "workers/parallel/rank.py",
        "        if not building.done():\n            return",
        "        await building",
        LINK,
    ),
    Planted(
        "a rank whose step broke goes on",
        "workers/parallel/rank.py",
        "        if error is not None and not self.broken.done():",
        "        if error is not None and self.broken.done():",
        LINK,
    ),
    Planted(
        "a frozen rank is noticed when somebody waits for it",
        "workers/engine/engine.py",
        "if self._limits.ranks > 1:",
        "if self._limits.ranks > 99:",
        GROUP,
    ),
    Planted(
        "a leader that beats does not wait for its ranks",
        "workers/parallel/group.py",
        "        self._group.ranks.broadcast(torch.zeros(1))\n",
        "",
        GROUP,
    ),
)

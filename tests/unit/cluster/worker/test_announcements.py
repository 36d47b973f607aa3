"""Each router learns all keys that a worker gained and lost, however often other routers ask."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.worker.heartbeats import UnsentAnnouncements
from tidemill.workers.messages import Announcement

KEYS = [bytes([number]) for number in range(3)]
ROUTERS = 3


class Engine:
    """An engine with its keys, and those that it last announced."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self._announced: set[bytes] = set()

    def take_announcement(self, *, full: bool) -> Announcement:
        before, self._announced = self._announced, set(self.keys)
        if full:
            return Announcement(added=tuple(self.keys), full=True)
        return Announcement(added=tuple(self.keys - before), removed=tuple(before - self.keys))


def each(what: str, choices: int) -> st.SearchStrategy[tuple[str, int]]:
    return st.tuples(st.just(what), st.sampled_from(range(choices)))


@given(
    st.lists(
        each("toggle", len(KEYS)) | each("ask", ROUTERS) | each("begin", ROUTERS) | each("forget", ROUTERS),
        min_size=20,
        max_size=60,
    )
)
def test_announcements_give_every_router_all_keys(operations: list[tuple[str, int]]) -> None:
    engine = Engine()
    news = UnsentAnnouncements(engine)
    known: dict[int, set[bytes]] = {}
    for what, which in operations:
        if what == "toggle":
            engine.keys ^= {KEYS[which]}
        elif what == "forget":
            news.forget(which)
            known.pop(which, None)
        elif what == "begin" or which in known:
            announced = news.take(which, full=what == "begin")
            assert announced.full == (what == "begin")
            assert not set(announced.added) & set(announced.removed)
            before = set[bytes]() if announced.full else known[which]
            known[which] = (before - set(announced.removed)) | set(announced.added)
            assert known[which] == engine.keys

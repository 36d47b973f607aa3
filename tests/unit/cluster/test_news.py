"""Each router hears from a worker all that came and went, however often the others listen."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.worker.heartbeats import UnsentAnnouncements
from tidemill.workers.messages import Announcement

KEYS = [bytes([number]) for number in range(6)]
LISTENERS = 3


class Engine:
    """Its keys, and those that came and went since it was asked last."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self._told: set[bytes] = set()

    def take_announcement(self, *, full: bool) -> Announcement:
        before, self._told = self._told, set(self.keys)
        if full:
            return Announcement(added=tuple(self.keys), full=True)
        return Announcement(added=tuple(self.keys - before), removed=tuple(before - self.keys))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("turn"), st.sampled_from(range(len(KEYS)))),
            st.tuples(st.just("listen"), st.sampled_from(range(LISTENERS))),
            st.tuples(st.just("begin"), st.sampled_from(range(LISTENERS))),
            st.tuples(st.just("forget"), st.sampled_from(range(LISTENERS))),
        ),
        max_size=60,
    )
)
def test_whoever_listens_knows_what_there_is(operations: list[tuple[str, int]]) -> None:
    engine = Engine()
    news = UnsentAnnouncements(engine)
    known: dict[int, set[bytes]] = {}
    for what, which in operations:
        if what == "turn":
            engine.keys ^= {KEYS[which]}
            continue
        if what == "forget":
            news.forget(which)
            known.pop(which, None)
            continue
        if what == "listen" and which not in known:
            continue
        heard = news.take(which, full=what == "begin")
        assert heard.full == (what == "begin")
        assert not set(heard.added) & set(heard.removed)
        before = set[bytes]() if heard.full else known[which]
        known[which] = (before - set(heard.removed)) | set(heard.added)
        assert known[which] == engine.keys

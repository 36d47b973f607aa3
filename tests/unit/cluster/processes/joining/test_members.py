"""The edges that tokens and certificates admit, as the journal of the supervisor has it."""

from hashlib import sha256

import msgspec
import pytest

from tidemill.cluster.processes.joining.members import JoiningEdge, JoinRefused, Members
from tidemill.workers.messages import RequestError

SECRET = "s" * 32
DAY_S = 86_400.0


def member(name: str = "aaaaaa", until_s: float = 100.0) -> JoiningEdge:
    return JoiningEdge(token=name, secret_sha256=sha256(SECRET.encode()).hexdigest(), until_s=until_s)


def joined(now_s: float = 10.0) -> Members:
    members = Members().with_token("web-1", member(), 0.0)
    name, members = members.admitted("aaaaaa", SECRET, "key", now_s)
    return members.certified(name, "abcdef0123", now_s + DAY_S, now_s)


@pytest.mark.parametrize(
    ("token", "secret", "key", "now_s", "line"),
    [
        ("bbbbbb", SECRET, "key", 10.0, "not one of this cluster"),
        ("aaaaaa", "t" * 32, "key", 10.0, "not one of this cluster"),
        ("aaaaaa", "", "key", 10.0, "not one of this cluster"),
        ("aaaaaa", SECRET, "another", 10.0, "was used by another edge"),
        ("aaaaaa", SECRET, "key", 100.0, "has expired"),
    ],
)
def test_token_is_refused_in_one_line(token: str, secret: str, key: str, now_s: float, line: str) -> None:
    with pytest.raises(JoinRefused, match=line) as refused:
        joined().admitted(token, secret, key, now_s)
    assert "tidemill join-token" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_same_key_may_ask_again_for_a_lost_answer() -> None:
    members = joined()
    assert members.admitted("aaaaaa", SECRET, "key", 20.0) == ("web-1", members)


def test_revoked_edge_gets_nothing_more() -> None:
    members = joined().without("web-1", 20.0)
    assert members.revoked == {"abcdef0123": 10.0 + DAY_S}
    with pytest.raises(JoinRefused, match="was revoked"):
        members.admitted("aaaaaa", SECRET, "key", 20.0)
    with pytest.raises(JoinRefused, match="was revoked"):
        members.renewing("abcdef0123", "key")
    again = members.with_token("web-1", member("cccccc", 200.0), 30.0)
    assert again.revoked == members.revoked, "a new token brings no certificate back"


@pytest.mark.parametrize("serial", ["abcdef0123", "AB:CD:EF:01:23", "0abcdef0123"])
def test_serial_of_an_edge_revokes_the_edge(serial: str) -> None:
    members = joined().certified("web-1", "99999999", 5 * DAY_S, 20.0).without(serial, 30.0)
    assert members.edges["web-1"].revoked
    assert members.revoked.keys() == {"abcdef0123", "99999999"}


def test_unused_token_is_revoked_by_the_name() -> None:
    members = Members().with_token("web-1", member(), 0.0).without("web-1", 1.0)
    with pytest.raises(JoinRefused, match="was revoked"):
        members.admitted("aaaaaa", SECRET, "key", 2.0)


def test_other_certificates_are_revoked_by_serial_for_good() -> None:
    members = Members().without("0123456789abcdef", 0.0)
    assert members.revoked == {"123456789abcdef": 0.0}
    assert members.without("1111111111", 1000 * DAY_S).revoked.keys() == {"123456789abcdef", "1111111111"}
    with pytest.raises(RequestError, match="neither an edge") as refused:
        members.without("web-7", 0.0)
    assert refused.value.status == 404


def test_name_is_in_use_until_everything_has_expired() -> None:
    with pytest.raises(RequestError, match="has a token or a certificate") as refused:
        joined().with_token("web-1", member("cccccc"), 20.0)
    assert refused.value.status == 409
    later = joined().with_token("web-1", member("cccccc"), 20.0 + DAY_S)
    assert later.edges["web-1"] == member("cccccc")
    for name in ("", "Web", "a b", "-a", "a" * 64):
        with pytest.raises(RequestError, match="no name of an edge"):
            Members().with_token(name, member(), 0.0)


def test_renewal_needs_the_same_key_and_a_serial_of_an_edge() -> None:
    assert joined().renewing("abcdef0123", "key") == "web-1"
    for serial, key in (("abcdef0123", "another"), ("ffffffff", "key"), ("", "key")):
        with pytest.raises(JoinRefused):
            joined().renewing(serial, key)


def test_what_has_expired_is_forgotten() -> None:
    members = joined().without("web-1", 20.0).with_token("web-2", member("dddddd"), 10 * DAY_S)
    assert members.edges.keys() == {"web-2"}
    assert not members.revoked


def test_members_survive_the_journal() -> None:
    members = joined().without("web-1", 20.0)
    assert msgspec.json.decode(msgspec.json.encode(members), type=Members) == members

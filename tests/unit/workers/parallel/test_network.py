"""Ranks on several nodes: who is let in, what a TLS connection carries, and where collectives run."""

import os
import socket
import ssl
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Never

import psutil
import pytest
import torch
import trustme
from pydantic import ValidationError

from tests.support.waits import WAIT_S_MAX
from tests.support.workers.ranks import network_of
from tests.support.workers.settings import plain_settings
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.workers.engine.build import build_engine
from tidemill.workers.models.collectives import LEADER
from tidemill.workers.parallel import distributed, link
from tidemill.workers.parallel.exchange import Exchange, open_exchange
from tidemill.workers.parallel.frames import Ints, Verb, ints, to_bytes
from tidemill.workers.parallel.link import (
    MeetingPlace,
    RankLinks,
    StartRanks,
    accept,
    hello,
    meeting_place,
)
from tidemill.workers.parallel.network import Network, Ports, TlsConnection, end_with_node, listen
from tidemill.workers.settings import SettingsError

HOST = network_of(None, LEADER).host
settings_of = partial(plain_settings, kernels="reference")
BIG_INTS = 300_000
FRAMES = 20


@pytest.fixture
def ours(tmp_path: Path) -> MutualTls:
    return issue(tmp_path / "ours", trustme.CA())


def called(place: MeetingPlace, certificates: MutualTls | None) -> socket.socket:
    assert isinstance(place.meeting, Ports)
    plain = socket.create_connection((place.meeting.host, place.meeting.link), timeout=WAIT_S_MAX)
    return (
        plain
        if certificates is None
        else certificates.client().wrap_socket(plain, server_hostname=CLUSTER_NAME)
    )


@contextmanager
def accepting(tls: MutualTls | None) -> Generator[tuple[MeetingPlace, "Future[RankLinks]"]]:
    network = network_of(tls, LEADER)
    with meeting_place(network) as place, ThreadPoolExecutor(1) as thread:
        yield place, thread.submit(accept, place, 2, lambda: None, network)


def test_callers_that_are_no_ranks_are_dropped_and_the_group_forms(
    ours: MutualTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One speaks no TLS, one is silent, one has no certificate, one has another authority's, one knows
    another secret, and one sends another frame."""
    monkeypatch.setattr(link, "HELLO_S_MAX", 0.3)
    stranger = issue(tmp_path / "theirs", trustme.CA())
    theirs = MutualTls(certificate=stranger.certificate, key=stranger.key, ca=ours.ca)
    without = ssl.create_default_context(cafile=ours.ca)
    with accepting(ours) as (place, accepted):
        assert isinstance(place.meeting, Ports)
        meeting = place.meeting
        other = Ports(host=meeting.host, link=meeting.link, store=meeting.store, secret=bytes(16))
        dropped = [called(place, None), called(place, None)]
        dropped[0].sendall(hello(1, meeting))
        dropped.append(without.wrap_socket(called(place, None), server_hostname=CLUSTER_NAME))
        with suppress(OSError):  # it may be refused by now
            dropped[-1].sendall(hello(1, meeting))
        dropped.append(called(place, theirs))
        with suppress(OSError):
            dropped[-1].sendall(hello(1, meeting))
        for data in (hello(1, other), to_bytes(Verb.STEP, 0, ints(range(9)))):
            dropped.append(called(place, ours))
            dropped[-1].sendall(data)
        for connection in dropped:
            with closing(connection):
                assert not received(connection)
        with closing(called(place, ours)) as connection:
            connection.sendall(hello(1, meeting) + to_bytes(Verb.READY, 0, ints()))
            links = accepted.result(20)
            assert [rank.ready.result(20).size for rank in links] == [0]
            links.end("the test is over")


def received(connection: socket.socket) -> bytes:
    """Return what comes before the end of a connection."""
    try:
        return connection.recv(1)
    except (ConnectionError, ssl.SSLError):
        return b""


def test_rank_leaves_a_leader_with_the_certificate_of_another_authority(
    ours: MutualTls, tmp_path: Path
) -> None:
    theirs = issue(tmp_path / "theirs", trustme.CA())
    with listen(HOST) as listener:
        answering = Thread(target=refused, args=(listener, theirs))
        answering.start()
        host, port = listener.getsockname()
        with pytest.raises(ssl.SSLCertVerificationError), socket.create_connection((host, port)) as plain:
            ours.client().wrap_socket(plain, server_hostname=CLUSTER_NAME)
        answering.join()


def refused(listener: socket.socket, certificates: MutualTls) -> None:
    with listener.accept()[0] as plain, pytest.raises(OSError, match=r"."):
        TlsConnection(plain, certificates.server())


def test_both_directions_of_a_tls_connection_carry_large_frames_concurrently(ours: MutualTls) -> None:
    """The leader's threads send while another of its threads reads."""
    sent: Ints = ints(range(BIG_INTS))
    with accepting(ours) as (place, accepted), closing(called(place, ours)) as connection:
        connection.sendall(hello(1, place.meeting))
        (rank,) = accepted.result(20)

        def echo() -> None:
            stream = connection.makefile("rb")
            for number in range(1, FRAMES + 1):
                frame = link.read_frame(stream)
                assert frame is not None
                connection.sendall(to_bytes(Verb.ANSWER, frame.number, frame.body[::-1].copy()))
                assert frame.number <= FRAMES, number

        echoing = Thread(target=echo)
        echoing.start()
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(rank.ask, Verb.PUT, sent) for _ in range(FRAMES)]
        for answer in asked:
            assert (answer.result(30).result(30) == sent[::-1]).all()
        echoing.join()
        rank.close()


def test_link_ends_soon_after_the_other_node_has_vanished() -> None:
    """Its kernel sends no more: see test_nodes.py for a line that is cut."""
    with listen(HOST) as listener, socket.create_connection(listener.getsockname()) as connection:
        end_with_node(connection)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        found = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert found[0] + found[1] * found[2] <= 5
        assert 0 < found[3] <= 5000


def exchanges(size: int, networks: list[Network], interface: str | None = None) -> list[Exchange]:
    """Return those of ranks on threads, over ports."""
    settings = settings_of(
        tensor_parallel_size=size, tensor_parallel_nodes=size, tensor_parallel_interface=interface
    )
    with meeting_place(networks[0]) as place, ThreadPoolExecutor(size) as threads:

        def meet(index: int) -> Exchange:
            store = place.store if index == LEADER else None
            device = torch.device("cpu")
            return open_exchange(settings, place.meeting, index, device, networks[index], store)

        return list(threads.map(meet, range(size)))


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports at which this process listens, some for what is garbage by now."""
    open_now = psutil.Process().net_connections("tcp")
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in open_now
        if connection.status == psutil.CONN_LISTEN
    }


def test_ranks_on_several_nodes_exchange_at_their_own_addresses() -> None:
    """No socket listens on every interface, and all ranks agree."""
    before = listening()
    found = exchanges(3, [network_of(None, index) for index in range(3)])
    try:
        hosts = {host for host, _ in listening() - before}
        assert hosts == {network_of(None, index).host for index in range(3)}
        assert all(each.control is each.model for each in found)

        def agree(each: Exchange) -> tuple[int, list[float]]:
            least = each.least((50, 30, 70)[each.control.index])
            sums = each.model.reduce(torch.full((2, 2), 0.1 * (each.control.index + 1)))
            return least, sums.flatten().tolist()

        with ThreadPoolExecutor(3) as threads:
            agreed = list(threads.map(agree, found))
        assert [least for least, _ in agreed] == [30] * 3
        assert all(sums == agreed[0][1] for _, sums in agreed)
    finally:
        for each in found:
            each.close()


def test_collectives_use_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = exchanges(2, [network_of(None, 0), network_of(None, 1)], interface="lo")
    hosts = {host for host, _ in listening()}
    assert "127.0.0.1" in hosts, "gloo listens at the interface's own address"
    for each in found:
        each.close()
    monkeypatch.delenv(distributed.NCCL_INTERFACE, raising=False)
    name_interface = distributed._name_interface
    name_interface(Network(host="127.0.0.1"))
    assert os.environ[distributed.NCCL_INTERFACE] == "=lo"
    name_interface(Network(host="127.0.0.1", interface="eth1"))
    assert os.environ[distributed.NCCL_INTERFACE] == "=eth1"
    name_interface(Network(host="127.0.0.1"))
    assert os.environ[distributed.NCCL_INTERFACE] == "=eth1", "the environment's own stays"


def test_groups_over_nodes_that_cannot_work_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"nodes is 3: .* the 4 ranks .* divisor of"):
        settings_of(tensor_parallel_size=4, tensor_parallel_nodes=3)
    with pytest.raises(ValidationError, match="tensor_parallel_nodes"):
        settings_of(tensor_parallel_size=4, tensor_parallel_nodes=0)
    with pytest.raises(SettingsError, match=r"shared-memory is for ranks on one node: leave it out"):
        settings_of(tensor_parallel_size=4, tensor_parallel_nodes=2, tensor_parallel_backend="shared-memory")
    group = settings_of(tensor_parallel_size=4, tensor_parallel_nodes=2)
    assert (group.backend, group.ranks_per_node) == ("gloo", 2)
    assert settings_of(device="cuda", tensor_parallel_size=2, tensor_parallel_nodes=2).backend == "nccl"
    started: list[object] = []

    def start(*given: object) -> Never:
        started.append(given)
        raise AssertionError

    with pytest.raises(SettingsError, match=r"--tensor-parallel-nodes is for a Ray cluster"):
        build_engine(group, lambda _done, _total: None, StartRanks(start))
    assert not started

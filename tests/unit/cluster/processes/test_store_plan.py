"""`serve --store` plans processes and the URL for workers, and refuses mistakes first."""

import socket
from urllib.parse import urlsplit

import psutil
import pytest

from tidemill.cluster.processes.store_plan import MemoryOwner, check_shared, other_tiers, plan_store
from tidemill.kvstore.errors import StoreError

GIB = 1 << 30


@pytest.mark.parametrize("url", ["file:///a?size=1GiB", "/mooncake", "file:///mooncake?size=1GiB,file:///b"])
def test_plan_starts_nothing_for_other_stores(url: str) -> None:
    plan = plan_store(url)
    assert plan.url == url == other_tiers(url)
    assert not plan.has_mooncake
    assert (plan.master, plan.owner) == (None, None)


@pytest.mark.parametrize("url", ["mooncake?size=1GiB", "mooncake:?size=1GiB", "mooncake://?size=1GiB"])
def test_plan_starts_master_and_memory_owner(url: str) -> None:
    plan = plan_store(url)
    assert plan.has_mooncake
    assert plan.master is not None
    assert plan.master.host == "127.0.0.1"
    assert plan.master.port != plan.master.admin_port
    address = f"127.0.0.1:{plan.master.port}"
    assert plan.owner == MemoryOwner(master=address, host="127.0.0.1", num_bytes=GIB)
    assert plan.url == f"mooncake://{address}?admin=127.0.0.1:{plan.master.admin_port}"


def test_plan_lends_part_of_memory_without_size() -> None:
    owner = plan_store("mooncake").owner
    assert owner is not None
    assert owner.num_bytes == min(8 * GIB, psutil.virtual_memory().total // 4)


def test_plan_takes_port_and_interface() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    plan = plan_store(f"mooncake?size=1GiB&host=lo&port={port}")
    assert urlsplit(plan.url).netloc == f"127.0.0.1:{port}"


def test_plan_joins_running_master() -> None:
    plan = plan_store("mooncake://store.example:50051?write=hits")
    assert plan.url == "mooncake://store.example:50051?write=hits"
    assert plan.joined == "store.example:50051"
    assert (plan.master, plan.owner) == (None, None)


def test_plan_lends_memory_to_running_master() -> None:
    plan = plan_store("mooncake://127.0.0.1:50051?protocol=rdma&device=mlx5_0&size=1GiB&timeout=1")
    assert plan.url == "mooncake://127.0.0.1:50051?protocol=rdma&device=mlx5_0&timeout=1"
    assert plan.master is None
    assert plan.owner == MemoryOwner(
        master="127.0.0.1:50051",
        host="",
        num_bytes=GIB,
        transport=(("protocol", "rdma"), ("device", "mlx5_0")),
    )


def test_plan_keeps_other_tiers_in_order() -> None:
    url = "file:///near?size=1GiB,mooncake://h:1?size=1GiB&host=127.0.0.1,file:///far?write=none"
    assert plan_store(url).url == "file:///near?size=1GiB,mooncake://h:1,file:///far?write=none"
    assert other_tiers(url) == "file:///near?size=1GiB,file:///far?write=none"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("mooncake?size=much", "512MiB"),
        ("mooncake?size=0", "memory"),
        ("mooncake?size=1000000GiB", "memory"),
        ("mooncake?size=1g&size=2g", "once"),
        ("mooncake?port=none", "port none"),
        ("mooncake?port=65536", "port 65536"),
        ("mooncake?host=0.0.0.0", "host 0.0.0.0"),
        ("mooncake?host=no-such-interface", "no-such-interface"),
        ("mooncake?host=192.0.2.1", "host="),
        ("mooncake://host", "mooncake://host:port"),
        ("mooncake://host:port", "mooncake://host:port"),
        ("mooncake://host:1?port=2", "port"),
        ("mooncake,mooncake://h:1", "one tier"),
        ("mooncake:10.0.0.5:50051", "mooncake://host:port"),
        ("mooncake://10.0.0.5:50051?host=lo", "size="),
    ],
)
def test_plan_refuses_mistakes_in_one_line(url: str, named: str) -> None:
    with pytest.raises(StoreError) as refused:
        plan_store(url)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_check_shared_refuses_only_stores_inside_one_process() -> None:
    check_shared("memory-of-pages/folder")
    check_shared("memory:?size=1MiB,file:///a")
    with pytest.raises(StoreError, match="inside one process"):
        check_shared("memory:?size=1MiB,memory")


def test_plan_refuses_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StoreError, match="port="):
            plan_store(f"mooncake?port={taken.getsockname()[1]}")

"""The oracle of the agents' benchmark knows when a prompt continues."""

from benchmarks.memory.agents import Work


def test_the_oracle_finds_at_least_what_lru_finds() -> None:
    work = Work(agents=2, blocks=600, sessions=1, pace=0.5)
    found = {order: work.run(order, "breakpoints", 600)["hit_ratio"] for order in ("lru", "oracle")}
    assert found["oracle"] > found["lru"]

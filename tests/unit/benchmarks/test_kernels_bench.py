# pyright: basic
# The benchmarks are not typed strictly.
"""The kernels' benchmark compares fairly, and survives what a peer cannot do."""

import sys
from pathlib import Path

import pytest
from benchmarks.kernels import models, peer
from benchmarks.kernels.clock import rounded
from benchmarks.kernels.models import Step, turns

pytestmark = pytest.mark.slow

ANSWERS = """
import json, sys
print(json.dumps({"vllm": "0"}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["seconds"] < 0:
        break
    answer = {"seconds": order["seconds"]} if order["seconds"] else {"error": "no"}
    print(json.dumps(answer), flush=True)
"""


def test_peer_answers_refuses_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    script.write_text(ANSWERS)
    monkeypatch.setattr(peer, "SCRIPT", script)
    with peer.vllm_peer(Path(sys.executable)) as one:
        assert one is not None
        assert one.versions == {"vllm": "0"}
        assert one.seconds(seconds=2.0) == 2.0
        with pytest.raises(peer.PeerFailed, match="no"):
            one.seconds(seconds=0)
        assert one.seconds(seconds=3.0) == 3.0
        with pytest.raises(peer.PeerFailed, match="ended with status 0"):
            one.seconds(seconds=-1)


def test_without_a_peer_there_is_none() -> None:
    with peer.vllm_peer(None) as one:
        assert one is None


def test_decode_time_is_the_difference_of_answers_and_the_best_turn_counts() -> None:
    delays = iter([5.0, 0.0, 3.0])

    def answer(prompts: list[list[int]], new_tokens: int) -> float:
        assert [len(prompt) for prompt in prompts] == [7, 7]
        return len(prompts) * new_tokens + (next(delays) if new_tokens == 1 else 0.0)

    assert turns(Step(7, 2, 4), {"ours": answer}, 3) == {"ours": 2 * 5 - 2}


def test_prefill_is_the_time_to_the_first_token() -> None:
    assert turns(Step(7, 1, 0), {"ours": lambda _, new: 3.0 * new}, 2) == {"ours": 3.0}


def test_side_that_fails_is_not_asked_again_and_one_that_is_slow_has_fewer_turns() -> None:
    asked: list[str] = []

    def fails(_prompts: list[list[int]], _new: int) -> float:
        asked.append("fails")
        raise peer.PeerFailed("head dim 32")

    def slow(_prompts: list[list[int]], _new: int) -> float:
        asked.append("slow")
        return models.SIDE_SECONDS_MAX + 1

    assert turns(Step(7, 1, 0), {"fails": fails, "slow": slow}, 3) == {
        "fails": "head dim 32",
        "slow": models.SIDE_SECONDS_MAX + 1,
    }
    assert asked == ["fails", "slow"]


@pytest.mark.parametrize(("num_bytes", "size"), [(1, 1 << 18), (1 << 20, 1 << 20), ((1 << 20) + 1, 1 << 21)])
def test_copies_have_the_size_of_their_operators(num_bytes: int, size: int) -> None:
    assert rounded(num_bytes) == size

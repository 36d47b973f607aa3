"""The rows beside peers that pages show: works of a model, servers, and goals of our time over theirs."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.peers.servers import OWN_BFLOAT16

ONE_THREAD = "--mixed 1 --threads 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Works of a model that ours and other servers take in turn.

    goals        the largest ratios by work, or None
    arrangement  our workers, with further flags
    older        without instructions for bfloat16
    """

    model: str
    peers: tuple[str, ...]
    goals: Mapping[str, float | None]
    arrangement: str = ONE_THREAD
    older: bool = False

    @property
    def servers(self) -> str:
        """Return the names of all, as results have them."""
        return ", ".join((*self.peers, "tidemill"))


STREAMS = ("c=1", "c=8", "c=32", "c=128")
FAMILIES = ("4 x 4 x (512 + 128), c=4", "4 x 4 x (1,400 + 128), c=4", "8 x 8 x (1,024 + 128), c=8")
LLAMA_CPP_GOALS = {"c=1": 1.0, "c=8": 0.5, "c=32": 0.5}
INTEGER_GOALS = {"c=8": 0.65, "c=32": 0.65, "c=128": 0.75}

CASES = (
    *(
        Case(model=f"smollm2-{kind}", peers=("llama.cpp",), goals=LLAMA_CPP_GOALS)
        for kind in ("Q4_1", "Q8_0")
    ),
    *(
        Case(
            model=model,
            peers=(OWN_BFLOAT16,),
            goals={"decode, 1 stream": goal},
            arrangement=f"{ONE_THREAD} --quantization {kind}",
        )
        for model in ("dense-hybrid", "dense-457m")
        for kind, goal in (("int8", 0.58), ("int4", 0.40))
    ),
    *(Case(model=f"dense-{kind}", peers=("vllm",), goals=INTEGER_GOALS) for kind in ("int8", "int4")),
    Case(model="dense", peers=("vllm",), goals={"c=8": 0.69, "c=32": 0.82, "c=128": 0.91}),
    Case(
        model="hybrid",
        peers=("vllm with bfloat16 states",),
        goals=dict.fromkeys((*STREAMS, *FAMILIES)),
        arrangement=f"{ONE_THREAD} --state-dtype bfloat16",
    ),
    *(
        Case(model=model, peers=("vllm",), goals=dict.fromkeys(STREAMS[:3]), older=True)
        for model in ("dense", "hybrid")
    ),
)
"""The goals of the dense model in bfloat16 are the ratios that were measured before."""

"""Every operator against its roofline, its definition, torch and vLLM's."""

from collections.abc import Callable
from typing import Any

from benchmarks.kernels.cases import Case, cases
from benchmarks.kernels.clock import Call, Roofline, best_seconds
from benchmarks.kernels.peer import Peer, PeerFailed
from tidemill.kernels.dispatch import REFERENCE, Operators

Row = dict[str, Any]
TURNS = 3


def operators(
    ours: Operators, half: Operators, vllm: Peer | None, roofline: Roofline, budget_seconds: float
) -> list[Row]:
    """Sides take turns, the roofline among them; the best of all turns counts. `half` has products in
    bfloat16."""
    rows = [measured(case, half if case.half else ours, vllm, roofline, budget_seconds) for case in cases()]
    for row in rows:
        row["roofline"] = roofline.seconds(row["num_bytes"], row["flops"])
        row["share"] = row["roofline"] / row["ours"]
    show(rows)
    return rows


def measured(
    case: Case, ours: Operators, vllm: Peer | None, roofline: Roofline, budget_seconds: float
) -> Row:
    """Return the CPU seconds of each side, or the error of a peer. The definition is slow, and runs once."""
    sides = {"ours": timed(case.run(ours), budget_seconds)}
    if case.torch is not None:
        sides["torch"] = timed(case.torch, budget_seconds)
    if vllm is not None and case.in_vllm:
        order = {"operator": case.operator, "size": case.size, "budget_seconds": budget_seconds}
        sides["vllm"] = lambda: vllm.seconds(**order)
    row: Row = {
        "operator": case.operator,
        "size": case.size,
        "num_bytes": case.num_bytes,
        "flops": case.flops,
    }
    for _ in range(TURNS):
        roofline.look(case.num_bytes)
        for side, took in list(sides.items()):
            try:
                row[side] = min(row.get(side, float("inf")), took())
            except PeerFailed as error:
                row[side] = str(error)
                del sides[side]
    return row | {"definition": best_seconds(case.run(REFERENCE), budget_seconds)}


def timed(call: Call, budget_seconds: float) -> Callable[[], float]:
    return lambda: best_seconds(call, budget_seconds)


def show(rows: list[Row]) -> None:
    """`x` columns: the time of that side divided by ours."""
    head = f"{'CPU us':>10}{'roofline':>10}{'share':>7}{'x definition':>14}{'x torch':>9}{'x vLLM':>8}"
    print(f"{'operator':68}{head}")
    for row in rows:
        name = f"{row['operator']} " + " ".join(f"{key}={value}" for key, value in row["size"].items())
        ratios = "".join(
            f"{row[side] / row['ours']:{width}.2f}" if isinstance(row.get(side), float) else " " * width
            for side, width in (("definition", 14), ("torch", 9), ("vllm", 8))
        )
        print(f"{name:68}{row['ours'] * 1e6:10.1f}{row['roofline'] * 1e6:10.1f}{row['share']:7.0%}{ratios}")
    failed = {f"vLLM's {row['operator']}: {row['vllm']}" for row in rows if isinstance(row.get("vllm"), str)}
    print(*sorted(failed), sep="\n", flush=True)

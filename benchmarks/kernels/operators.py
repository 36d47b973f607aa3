"""Every operator against its roofline, its definition and torch."""

from typing import Any

from benchmarks.kernels.cases import Case, cases
from benchmarks.kernels.clock import Roofline, best_seconds
from tidemill.kernels.dispatch import REFERENCE, Operators

Row = dict[str, Any]
TURNS = 3


def operators(ours: Operators, half: Operators, roofline: Roofline, budget_seconds: float) -> list[Row]:
    """Sides take turns, the roofline among them; the best of all turns counts. `half` has products in
    bfloat16."""
    rows = [measured(case, half if case.half else ours, roofline, budget_seconds) for case in cases()]
    for row in rows:
        row["roofline"] = roofline.seconds(row["num_bytes"], row["flops"])
        row["share"] = row["roofline"] / row["ours"]
    show(rows)
    return rows


def measured(case: Case, ours: Operators, roofline: Roofline, budget_seconds: float) -> Row:
    """Return the CPU seconds of each side. The definition is slow, and runs once."""
    sides = {"ours": case.run(ours)} | ({} if case.torch is None else {"torch": case.torch})
    row: Row = {
        "operator": case.operator,
        "size": case.size,
        "num_bytes": case.num_bytes,
        "flops": case.flops,
    }
    for _ in range(TURNS):
        roofline.look(case.num_bytes)
        for side, call in sides.items():
            row[side] = min(row.get(side, float("inf")), best_seconds(call, budget_seconds))
    return row | {"definition": best_seconds(case.run(REFERENCE), budget_seconds)}


def show(rows: list[Row]) -> None:
    """`x` columns: the time of that side divided by ours."""
    head = f"{'CPU us':>10}{'roofline':>10}{'share':>7}{'x definition':>14}{'x torch':>9}"
    print(f"{'operator':68}{head}")
    for row in rows:
        name = f"{row['operator']} " + " ".join(f"{key}={value}" for key, value in row["size"].items())
        ratios = "".join(
            f"{row[side] / row['ours']:{width}.2f}" if isinstance(row.get(side), float) else " " * width
            for side, width in (("definition", 14), ("torch", 9))
        )
        print(f"{name:68}{row['ours'] * 1e6:10.1f}{row['roofline'] * 1e6:10.1f}{row['share']:7.0%}{ratios}")

"""Indices beyond their tables end the process with a line: they would read or write memory of others."""

import faulthandler
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.kernels.cases import Step, step
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice

PAGES, WIDTH, STATES, EXPERTS, DIM = 7, 3, 5, 4, 8
TABLE = [[0, 1, 2], [3, 4, 5]]
NEW, BEFORE = [2, 3], [15, 30]  # the rows end in the second and third of pages of 16 tokens
FAR = 1 << 30

Run = Callable[[Operators, Step], object]
Changes = dict[str, list[int] | list[list[int]]]


def _attend(ops: Operators, rows: Step) -> None:
    ops.attention(torch.zeros(5, 1, DIM), torch.zeros(PAGES, 1, 2, 16, DIM), rows, None, None)


def _store(ops: Operators, rows: Step) -> None:
    x_THD, angles_T2R = torch.zeros(5, 1, DIM), torch.zeros(5, 2, 2)
    cache = torch.zeros(PAGES, 1, 2, 16, DIM)
    ops.rope_store(x_THD, x_THD, x_THD, None, None, 1e-6, angles_T2R, cache, rows)


def _convolve(ops: Operators, rows: Step) -> None:
    ops.causal_conv(
        torch.zeros(5, 1, DIM), torch.zeros(4, 1, DIM), None, torch.zeros(STATES, 1, 3, DIM), rows
    )


def _recur(ops: Operators, rows: Step) -> None:
    heads_1, states = torch.zeros(1), torch.zeros(STATES, 1, 1, DIM, DIM)
    ops.gated_delta(torch.zeros(5, 1, 3 * DIM), torch.zeros(5, 2), heads_1, heads_1, states, rows)


def _scan(ops: Operators, rows: Step) -> None:
    heads_1, states = torch.zeros(1), torch.zeros(STATES, 1, 1, DIM, DIM)
    heads = Heads(heads_1, heads_1, heads_1, 0.0, 1.0)
    mixed_TGC, z_TGRV = torch.zeros(5, 1, 3 * DIM), torch.zeros(5, 1, 1, DIM)
    ops.mamba2(mixed_TGC, z_TGRV, torch.zeros(5, 1), heads, states, rows)


def _of_rows(run: Run, ops: Operators, **changes: list[int] | list[list[int]]) -> None:
    pages = torch.tensor(TABLE, dtype=torch.int32)
    rows = step(NEW, BEFORE, pages, writes=[[-1, 0], [1, 2]])
    run(
        ops,
        replace(rows, **{name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()}),
    )


def _choose(chosen: int, ops: Operators, *, outer: bool) -> None:
    choice = Choice(torch.tensor([[0, chosen]], dtype=torch.int32), torch.ones(1, 2))
    gate_up, down = torch.zeros(EXPERTS, 2 * DIM, DIM), torch.zeros(EXPERTS, DIM, DIM)
    experts = Experts(ops.pack([plain(gate_up)], None), ops.pack([plain(down)], None))
    if outer:
        ops.moe_outer(torch.zeros(1, 2, DIM), choice, experts, None, None)
    else:
        ops.moe_inner(torch.zeros(1, DIM), choice, experts)


def _adjust(
    ops: Operators,
    *,
    source: float = 0,
    slot: float = -1,
    mask: float = -1,
    end: float = 1,
    token: float = 0,
) -> None:
    rows_MF = torch.tensor([[source, slot, 1.0, 0.0, 0.0, mask, 0, end]], dtype=torch.float64)
    items_IF = torch.tensor([[token, 0.0, 0.5]], dtype=torch.float64)
    counts_SV, masks_GW = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    ops.adjust(torch.zeros(3, 5), counts_SV, masks_GW, rows_MF, items_IF)


def _count(ops: Operators, row: float, token: float) -> None:
    ops.count(torch.zeros(2, 5, dtype=torch.int32), torch.tensor([[row, token, 1.0]], dtype=torch.float64))


def _draw(ops: Operators, source: float) -> None:
    draws_NF = torch.tensor([[source, 0.0, 0.0, -1, 0, 1.0, 0]], dtype=torch.float64)
    ops.draw(torch.zeros(3, 5), torch.zeros(1, 5), draws_NF, 0)


PAGED: dict[str, Run] = {"attention": _attend, "rope_store": _store}
RECURRENT: dict[str, Run] = {"causal_conv": _convolve, "gated_delta": _recur, "mamba2": _scan}
ROWS: dict[str, Changes] = {
    "start -2 is not in [0, 6)": {"cu_B1": [0, -2, 5]},
    "start 1 is not in [2, 6)": {"cu_B1": [0, 2, 1]},
    "start 6 is not in [0, 6)": {"cu_B1": [0, 6, 5]},
    "start 4 is not in [5, 6)": {"cu_B1": [0, 2, 4]},
}
OF_PAGES: dict[str, Changes] = ROWS | {
    "page 7 is not in [0, 7)": {"pages_BN": [[0, 1, 2], [3, 7, 5]]},
    f"page {FAR} is not in [0, 7)": {"pages_BN": [[0, FAR, 2], [3, 4, 5]]},
    "page -1 is not in [0, 7)": {"pages_BN": [[0, 1, 2], [3, 4, -1]]},
    "length 49 is not in [0, 49)": {"lens_B": [17, 49]},
    "length -1 is not in [0, 49)": {"lens_B": [-1, 33]},
}
OF_STATES: dict[str, Changes] = ROWS | {
    "state to read 5 is not in [-1, 5)": {"read_B": [0, 5]},
    "state to read -2 is not in [-1, 5)": {"read_B": [-2, 0]},
    "state to write 5 is not in [-1, 5)": {"writes_BK": [[-1, 5], [1, 2]]},
    f"state to write -{FAR} is not in [-1, 5)": {"writes_BK": [[-1, 0], [-FAR, 2]]},
}
BEYOND: dict[str, Callable[[Operators], None]] = {
    f"{kernel}: {line}": partial(_of_rows, run, **changes)
    for runs, lines in ((PAGED, OF_PAGES), (RECURRENT, OF_STATES))
    for kernel, run in runs.items()
    for line, changes in lines.items()
} | {
    "moe: expert 4 is not in [-1, 4)": partial(_choose, 4, outer=False),
    "moe: expert -2 is not in [-1, 4)": partial(_choose, -2, outer=False),
    f"moe: expert {FAR} is not in [-1, 4)": partial(_choose, FAR, outer=True),
    "draw: token -1099511627776 is not in [0, 5)": partial(_adjust, token=-(2.0**40)),
    "draw: token -1 is not in [0, 5)": partial(_adjust, token=-1),
    "draw: token 5 is not in [0, 5)": partial(_adjust, token=5),
    "draw: token nan is not in [0, 5)": partial(_adjust, token=math.nan),
    "draw: token 9.22337203685478e+18 is not in [0, 5)": partial(_adjust, token=2.0**63),
    "draw: logits 3 is not in [0, 3)": partial(_adjust, source=3),
    "draw: counts 2 is not in [0, 2)": partial(_adjust, slot=2),
    "draw: mask 1 is not in [0, 1)": partial(_adjust, mask=1),
    "draw: item 2 is not in [0, 2)": partial(_adjust, end=2),
    "draw: counts 3 is not in [0, 2)": partial(_count, row=3, token=0),
    "draw: token -5 is not in [0, 5)": partial(_count, row=0, token=-5),
    "draw: scores 1 is not in [0, 1)": partial(_draw, source=-2),
    "draw: logits 4 is not in [0, 3)": partial(_draw, source=4),
}


@pytest.mark.parametrize("line", BEYOND)
def test_index_beyond_its_table_ends_the_process_with_a_line(
    cpu: Operators, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            BEYOND[line](cpu)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGABRT
    assert capfd.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("kernel", [*PAGED, *RECURRENT])
def test_indices_at_the_ends_of_their_tables_are_used(cpu: Operators, kernel: str) -> None:
    """Entries of pages that no token sees may be anything, and rows without tokens are not looked at."""
    _of_rows(
        {**PAGED, **RECURRENT}[kernel],
        cpu,
        pages_BN=[[0, PAGES - 1, FAR], [3, 4, 5]],
        lens_B=[32, 48],
        read_B=[STATES - 1, -1],
        writes_BK=[[-1, STATES - 1], [0, -1]],
    )


@pytest.mark.parametrize("token", [-1, 5])
def test_embed_refuses_a_token_beyond_its_table(cpu: Operators, token: int) -> None:
    with pytest.raises(IndexError):
        cpu.embed(torch.tensor([token]), plain(torch.zeros(5, DIM)))

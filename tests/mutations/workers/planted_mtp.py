"""Bugs to plant in guesses by a prediction head."""

from tests.mutations.planted import UNIT, Planted

SLOTS = f"{UNIT}/workers/execution/test_mtp_drafter.py"
GROUP = f"{UNIT}/workers/parallel/test_group.py"
DRAFTS = f"{UNIT}/workers/execution/test_ngram_drafter.py"
PARITY = "tests/parity/test_mtp.py"

MTP_BUGS = (
    Planted(
        "the slot at the beginning of a page is left to nobody",
        "workers/execution/mtp_drafter.py",
        "first, last = row.start + (row.start % page_tokens != 0), row.end - 1",
        "first, last = row.start + 1, row.end - 1",
        SLOTS,
    ),
    Planted(
        "a page depends on the hidden state before it",
        "workers/execution/mtp_drafter.py",
        "if at % page_tokens or at == drawn_at else NONE for at in places",
        "if at != row.start else NONE for at in places",
        SLOTS,
    ),
    Planted(
        "a slot has the hidden state behind its own token",
        "workers/execution/mtp_drafter.py",
        "offset + at - 1 - row.start if",
        "min(offset + at - row.start, len(tokens) - 1) if",
        SLOTS,
    ),
    Planted(
        "wrong guesses count among the slots",
        "workers/execution/mtp_drafter.py",
        "drawn_at = row.end - row.drafts + end.num_drawn - 1",
        "drawn_at = row.end",
        SLOTS,
    ),
    Planted(
        "a guess is written to a page that the row has not",
        "workers/execution/mtp_drafter.py",
        "and row.end < len(row.pages) * self._page_tokens",
        "",
        SLOTS,
    ),
    Planted(
        "guesses of an earlier row are tried",
        "workers/execution/ngram_drafter.py",
        "return self._guesses[:most] if len(tokens) == self._behind else ()",
        "return self._guesses[:most]",
        DRAFTS,
    ),
    Planted(
        "the head sees the token where the hidden state belongs",
        "workers/models/architectures/mtp.py",
        "torch.cat([token_TH, before_TH], dim=1)",
        "torch.cat([before_TH, token_TH], dim=1)",
        PARITY,
    ),
    Planted(
        "the ranks wait for what a broken draw has drawn",
        "workers/parallel/group.py",
        "        finally:\n            self._group.ranks.broadcast(told_N2)\n",
        "        finally:\n            pass\n        self._group.ranks.broadcast(told_N2)\n",
        GROUP,
    ),
    Planted(
        "the ranks guess by themselves",
        "workers/parallel/group.py",
        "            told_N2 = torch.tensor(ends_of(drawn))\n",
        "            told_N2 = torch.zeros_like(told_N2)\n",
        GROUP,
    ),
)

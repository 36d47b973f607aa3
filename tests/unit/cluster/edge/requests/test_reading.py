"""`tidemill status`, `tidemill memory` and `tidemill demo` read a real server of the edge."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from tests.support.cluster.fake_service import (
    EOS,
    FakeService,
    app_over,
    call,
    post,
    saying,
    serving,
    tokenizer,
    with_server,
    worker_status,
)
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.demo import run_demo
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.status import fetch_status, human_bytes, render
from tidemill.cluster.cli.worker_commands import fetch_memory, render_memory
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Request, RequestError, Unserved

MIB = 1 << 20
FACTS = " Emma has a lamp. Tom is in the tower."
ANSWERS = {"Who has a lamp?": "Emma.", "Where is Tom?": "The tower."}


def drawn(item: object) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(item)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def status_of(service: FakeService) -> dict[str, object]:
    return with_server(service, lambda url: fetch_status(ServerAddress(url)))


def test_every_worker_is_a_row() -> None:
    odd = worker_status("[red]decode-1", state="silent")
    status = status_of(FakeService(saying(" a"), workers=(worker_status("decode-0"), odd)))
    text = drawn(render(status))
    who, work, held, stores = [" ".join(line.split()) for line in text.splitlines() if "decode-0" in line]
    assert who == "decode-0 decode 1 7 here ready"
    assert work == "decode-0 2 0 0 6 0 B 4.00 MiB"
    assert held == "decode-0 1.00 MiB 0 B 0 B 0 B 3.00 MiB 0 B 0 B"
    assert stores == "decode-0 up 7 4 0 0 5 0 2.00 KiB 0 B"
    assert "[red]decode-1" in text
    assert "silent for 0.5 s" in text
    assert "keeper, up to 512 tokens" in text


def test_empty_fleet_is_reported() -> None:
    assert "no worker is alive" in drawn(render(status_of(FakeService(saying(" a"), workers=()))))


def test_missing_server_is_one_line_that_names_the_fix() -> None:
    for url in ("http://127.0.0.1:9", "nonsense", "http://[::1"):
        with pytest.raises(Unserved, match="--url") as error:
            fetch_status(ServerAddress(url))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1 << 20, "1.00 MiB"),
        (3 << 38, "768 GiB"),
        (1 << 53, "8192 TiB"),
    ],
)
def test_sizes_have_three_digits(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_every_worker_reports_its_memory() -> None:
    rows = call(app_over(FakeService(saying(" a"))), "GET", "/cluster/memory").json()["workers"]
    assert [row["name"] for row in rows] == ["prefill-0", "decode-0"]
    assert rows[1] == {
        "name": "decode-0",
        "role": "decode",
        "device": "here/cpu",
        "budget_bytes": 4 * MIB,
        "floor_bytes": MIB,
        "max_bytes": 16 * MIB,
        "share_bytes": 8 * MIB,
        "wanted_bytes": 0,
        "set_by": "broker",
        "set_bytes": 5 * MIB,
        "memory": {
            "pages_live": MIB,
            "pages_cached": 0,
            "states_live": 0,
            "states_cached": 0,
            "windows_live": 0,
            "windows_cached": 0,
            "free": 3 * MIB,
            "empty": 0,
            "unmapped": 0,
        },
    }


def test_table_fits_and_names_are_no_markup() -> None:
    workers = (worker_status("prefill-0", "prefill"), worker_status("[red]decode-1"))
    memory = with_server(
        FakeService(saying(" a"), workers=workers), lambda url: fetch_memory(ServerAddress(url))
    )
    text = drawn(render_memory(memory))
    set_line, held_line = [" ".join(line.split()) for line in text.splitlines() if "prefill-0" in line]
    assert set_line == "prefill-0 prefill broker 4.00 MiB 5.00 MiB 1.00 MiB 16.0 MiB"
    assert held_line == "prefill-0 1.00 MiB 0 B 0 B 0 B 3.00 MiB 0 B 0 B"
    assert text.count("[red]decode-1") == 2
    assert "no worker is alive" in drawn(render_memory({"workers": []}))


def test_command_sets_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    here = FakeService(saying(" a"))

    def memory(url: str, *arguments: str) -> str:
        options = cli.parser().parse_args(["memory", "--url", url, *arguments])
        assert options.run(options) == 0
        return capsys.readouterr().out

    def main(url: str) -> None:
        for budget in ("2GiB", "auto"):
            shown = memory(url, "--json", "--worker", "decode-0", "--budget", budget)
            assert len(json.loads(shown)["workers"]) == 2
        assert "decode-0" in memory(url)
        with pytest.raises(RequestError, match="no worker 'decode-7'"):
            memory(url, "--worker", "decode-7", "--budget", "1GiB")

    with_server(here, main)
    for budget in (512 * MIB, "512MiB"):
        body = {"worker": "decode-0", "budget": budget}
        assert post(app_over(here), "/cluster/memory", body).status_code == 200
    assert here.budgets == [("decode-0", num_bytes) for num_bytes in (2 << 30, None, 512 * MIB, 512 * MIB)]


def answering(request: Request) -> list[int]:
    asked = "".join(map(tokenizer().decoder().push, request.tokens))
    (answer,) = (answer for question, answer in ANSWERS.items() if question in asked)
    return [*tokenizer().encode(f" {answer}"), EOS]


async def demo(service: FakeService, folder: Path, answers: dict[str, str]) -> tuple[bool, str]:
    asked = [
        {"question": question, "answer": answer, "kind": "static"} for question, answer in answers.items()
    ]
    (folder / "demo.json").write_text(json.dumps({"notebook": FACTS, "questions": asked}))
    console = Console(file=StringIO(), width=200)
    async with serving(app_over(service)) as url:
        right = await run_demo(url, "keeper", folder, console)
    return right, cast("StringIO", console.file).getvalue()


async def test_demo_is_right_when_every_answer_is(tmp_path: Path) -> None:
    service = FakeService(answering)
    right, text = await demo(service, tmp_path, ANSWERS)
    assert right
    assert "2 of 2 answers are right" in text
    assert all(request.sampling.temperature == 0 for request in service.requests)
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["2"] and " t" in line]
    prompt_tokens = len(service.requests[1].tokens)
    prompt = f"{prompt_tokens // 4} p + {prompt_tokens % 4} t"
    assert " ".join(row.split()) == f"2 {prompt} 1 p 3 t 1 t 2 t"
    right, text = await demo(service, tmp_path, {**ANSWERS, "Where is Tom?": "The harbor."})
    assert not right
    assert "1 of 2 answers are right" in text


@pytest.mark.parametrize("fail_at", [0, 1])
async def test_demo_explains_a_missing_answer(tmp_path: Path, fail_at: int) -> None:
    with pytest.raises(Unserved, match="no worker is left"):
        await demo(replace(FakeService(answering), fail_at=fail_at), tmp_path, ANSWERS)


async def test_model_without_a_demo_is_named(tmp_path: Path) -> None:
    with pytest.raises(TidemillError, match=r"demo\.json"):
        await run_demo("http://127.0.0.1:9", "keeper", tmp_path, Console())

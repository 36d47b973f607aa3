"""`tidemill status --watch`: again and again, also while the server is away, until somebody leaves."""

import asyncio
import json
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from tests.support.cluster.fake_service import FakeService, app_over, saying, serving
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.watch_screen import poll, show_live
from tidemill.workers.messages import RequestError, Unserved


def shown(*items: str | Exception, terminal: bool = False) -> str:
    """What is drawn of these looks, after which somebody leaves."""
    left = list(items)

    def look() -> str:
        if not left:
            raise KeyboardInterrupt
        item = left.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    console = Console(file=StringIO(), width=80, force_terminal=terminal)
    show_live(poll(look, lambda: None), Text, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_pause_is_after_every_look() -> None:
    pauses: list[int] = []
    seen = poll(lambda: "a", lambda: pauses.append(1))
    assert [next(seen), next(seen), next(seen)] == ["a", "a", "a"]
    assert len(pauses) == 2


def test_where_there_is_no_terminal_frames_come_one_after_the_other() -> None:
    text = shown("one", "two")
    assert text.index("one") < text.index("two")
    assert "\x1b" not in text


def test_a_terminal_has_a_screen_of_its_own_and_gets_back_what_it_had() -> None:
    text = shown("one", "two", terminal=True)
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert text.index("one") < text.index("two") < text.index("\x1b[?1049l")


def test_a_server_that_is_away_is_said_above_what_was_seen_last() -> None:
    before, away, after = shown(Unserved("nobody there"), "one", Unserved("gone"), "two").split("one\n")[:3]
    assert before == "nobody there. Trying again.\n"
    assert away == "gone. Trying again.\nWhat is below is old.\n\n"
    assert after == "two\n"


def test_a_wrong_key_stays_wrong() -> None:
    with pytest.raises(RequestError):
        shown(RequestError("an unknown key"))


class Visit:
    """Sleeps of a command; at the last one somebody leaves."""

    def __init__(self, sleeps: int) -> None:
        self.left = sleeps
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def run(self, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr(cli.time, "sleep", self.sleep)
        options = cli.parser().parse_args(arguments)
        return options.run(options)


@pytest.mark.parametrize("command", [("status", "--watch", "0.5"), ("top", "--interval", "0.5")])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_commands_end_well(
    command: tuple[str, ...],
    as_json: bool,  # noqa: FBT001 - a parameter of a test
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    visit = Visit(3)

    async def main() -> int:
        async with serving(app_over(FakeService(saying(" a")))) as url:
            given = (*command, "--url", url, *(("--json",) if as_json else ()))
            return await asyncio.to_thread(visit.run, *given, monkeypatch=monkeypatch)

    assert asyncio.run(main()) == 0
    assert set(visit.slept) == {0.5}
    out = capsys.readouterr().out
    num_frames = 3 if command[0] == "status" else 2  # a rate takes two looks
    if as_json:
        assert len([json.loads(line) for line in out.splitlines()]) == num_frames
    else:
        assert out.count("prefill-0") % num_frames == 0
        assert "prefill-0" in out


def test_json_of_a_server_that_is_away_is_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    assert Visit(2).run("status", "--url", url, "--watch", "--json", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Trying again.") == 2

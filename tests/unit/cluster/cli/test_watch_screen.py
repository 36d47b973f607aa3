"""`tidemill status --watch` repeats until Ctrl-C, also while the server is away."""

import json
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from tests.support.cluster.fake_service import FakeService, saying
from tests.support.cluster.served import with_server
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.watch_screen import poll, show_live
from tidemill.workers.messages import RequestError, Unserved


def show(*items: str | Exception, terminal: bool = False) -> str:
    """Return the output for these views, after which Ctrl-C ends the command."""
    left = list(items)

    def fetch() -> str:
        if not left:
            raise KeyboardInterrupt
        item = left.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    console = Console(file=StringIO(), width=80, force_terminal=terminal)
    show_live(poll(fetch, lambda: None), Text, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_poll_pauses_after_every_view() -> None:
    pauses: list[int] = []
    views = poll(lambda: "a", lambda: pauses.append(1))
    assert [next(views), next(views), next(views)] == ["a", "a", "a"]
    assert len(pauses) == 2


def test_show_live_without_terminal_prints_views_in_order() -> None:
    text = show("one", "two")
    assert text.index("one") < text.index("two")
    assert "\x1b" not in text


def test_show_live_restores_terminal_screen() -> None:
    text = show("one", "two", terminal=True)
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible again"
    assert text.index("one") < text.index("two") < text.index("\x1b[?1049l")


def test_show_live_shows_error_above_last_view() -> None:
    before, away, after = show(Unserved("connection refused"), "one", Unserved("gone"), "two").split("one\n")[
        :3
    ]
    assert before == "connection refused. Trying again.\n"
    assert away == "gone. Trying again.\nThe view below is outdated.\n\n"
    assert after == "two\n"


def test_show_live_ends_on_request_error() -> None:
    with pytest.raises(RequestError):
        show(RequestError("an unknown key"))


class Session:
    """Replaces the sleeps of a command; the last one raises KeyboardInterrupt."""

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
def test_watching_commands_end_on_interrupt(
    command: tuple[str, ...],
    as_json: bool,  # noqa: FBT001 - a parameter of a test
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session(3)

    def run(url: str) -> int:
        arguments = (*command, "--url", url, *(("--json",) if as_json else ()))
        return session.run(*arguments, monkeypatch=monkeypatch)

    assert with_server(FakeService(saying(" a")), run) == 0
    assert set(session.slept) == {0.5}
    out = capsys.readouterr().out
    num_frames = 3 if command[0] == "status" else 2  # a rate takes two snapshots
    if as_json:
        assert len([json.loads(line) for line in out.splitlines()]) == num_frames
    else:
        assert out.count("prefill-0") % num_frames == 0
        assert "prefill-0" in out


def test_watch_json_prints_nothing_while_server_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    assert Session(2).run("status", "--url", url, "--watch", "--json", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Trying again.") == 2

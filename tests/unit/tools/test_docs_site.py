"""The documentation: every page is in the site, and the parser knows its commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tools.docs_site import loaded_from_elsewhere, pages, stage, with_blank_lines

from tidemill.cluster.cli.main import parser

ROOT = Path(__file__).parents[3]
PAGES = pages(ROOT)


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def listed(entry: Any) -> Iterator[str]:  # noqa: ANN401 - YAML
    """Yield the pages of the navigation."""
    match entry:
        case str():
            yield entry
        case list():
            for child in cast("list[Any]", entry):
                yield from listed(child)
        case dict():
            for child in cast("dict[str, Any]", entry).values():
                yield from listed(child)
        case _:
            raise AssertionError(entry)


def test_navigation_has_every_page() -> None:
    navigation = set(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    documents = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")}
    assert documents <= navigation, "add a line to mkdocs.yml for each new page"
    assert not [name for name in navigation if not (ROOT / name).is_file()]


def shell_blocks(text: str) -> Iterator[str]:
    """Yield the code blocks of a page that have no language, or that of a shell."""
    parts = re.split(r"^ *```(.*)$", text, flags=re.MULTILINE)  # text, language, code, "", text, ...
    for language, code in zip(parts[1::4], parts[2::4], strict=True):
        if language in {"", "sh", "bash"}:
            yield code


def commands(text: str) -> Iterator[str]:
    """Yield the complete `tidemill` commands of a page; optional parts in brackets are given."""
    for block in shell_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r"\s+#\s|\s+#$|; ", line):
                if command.strip().startswith("tidemill ") and "..." not in command:
                    yield re.sub(r"[\[\]]", "", command.strip())


def refused(command: str) -> bool:
    """Return whether the parser refuses a command."""
    try:
        parser().parse_args(shlex.split(command)[1:])
    except SystemExit as ended:
        return ended.code != 0
    return False


def test_commands_are_those_of_the_parser(page: Path) -> None:
    assert not [command for command in commands(page.read_text()) if refused(command)]
    assert refused("tidemill serve keeper --no-such-flag")


def test_most_pages_with_commands_are_found() -> None:
    """The rules above see commands; an empty list would pass them."""
    counts = {page.name: len(list(commands(page.read_text()))) for page in PAGES}
    assert counts["quickstart.md"] >= 3
    assert sum(counts.values()) >= 20


def test_site_has_files_that_pages_link_to(tmp_path: Path) -> None:
    stage(ROOT, tmp_path)
    assert (tmp_path / "docs/images/request.svg").is_file()
    assert (tmp_path / "deploy/compose.yaml").is_file()


def test_lists_and_tables_follow_a_blank_line() -> None:
    code = "```\n- in code\n| in code\n```\n"
    assert with_blank_lines(code) == code
    text = "Text:\n- a\n  more\n- b\n| x |\n|---|\n1. c\n"
    assert with_blank_lines(text) == "Text:\n\n- a\n  more\n- b\n\n| x |\n|---|\n\n1. c\n"
    assert with_blank_lines(f"{code}- d\n") == f"{code}\n- d\n"


def test_assets_of_other_hosts_are_found() -> None:
    assert loaded_from_elsewhere('<script src="https://cdn.example/x.js"></script>') == [
        "https://cdn.example/x.js"
    ]
    assert not loaded_from_elsewhere('<link rel="canonical" href="https://tidemill.example/">')
    assert not loaded_from_elsewhere('<a href="https://example.com/">a link</a>')

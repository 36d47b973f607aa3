"""The page at `/` as files: open, self-contained, and of one piece with its scripts."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tidemill.cluster.edge.http.dashboard import CONTENT_SECURITY_POLICY, FILES, FOLDER, PAGE_PATHS, PATHS

PAGES = {name: (FOLDER / name).read_text() for name in PATHS}
HTML = "\n".join(PAGES.values())
BANNER = "/*! https://github.com/leeoniya/uPlot"
SCRIPTS = {name: (FOLDER / name).read_text() for name in FILES if name.endswith(".js")}
PYPROJECT = (Path(__file__).parents[5] / "pyproject.toml").read_text()
get = partial(call, app_over(FakeService(saying("a"))))


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_every_file_comes_with_the_policy(path: str) -> None:
    reply = get("GET", path)
    assert reply.status_code == 200
    names = {path: name for name, path in PATHS.items()}
    assert reply.content == (FOLDER / names.get(path, path.removeprefix("/page/"))).read_bytes()
    assert reply.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"
    head = get("HEAD", path)
    assert head.status_code == 200
    assert head.headers["content-length"] == reply.headers["content-length"]


@pytest.mark.parametrize("path", ["/page/index.html", "/page/%2e%2e/http/app.py", "/page/"])
def test_nothing_else_is_a_file(path: str) -> None:
    assert get("GET", path).status_code == 404


def test_policy_lets_nothing_in_from_outside() -> None:
    rules = [rule.split() for rule in CONTENT_SECURITY_POLICY.split("; ")]
    assert ["default-src", "'none'"] in rules
    sources = {source for name, *rule in rules if name.endswith("-src") for source in rule}
    assert sources == {"'none'", "'self'"}


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_server(name: str) -> None:
    text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "").replace(BANNER, "")
    assert not re.findall(r"""https?://|["'(]//|@import|data:[a-z]+/""", text)


@pytest.mark.parametrize("name", SCRIPTS)
def test_data_becomes_text_and_nothing_else(name: str) -> None:
    banned = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|DOMParser|Contextual"
    assert not re.findall(banned, SCRIPTS[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_of_a_script_exist(name: str) -> None:
    for names, file in re.findall(r'import \{([^}]*)\} from "\./([a-z]+\.js)"', SCRIPTS[name]):
        for imported in filter(None, (imported.strip() for imported in names.split(","))):
            assert re.search(rf"export (async )?(function\*?|class|const) {imported}\b", SCRIPTS[file]), (
                imported
            )


def test_every_id_and_part_that_a_script_looks_for_is_on_the_page() -> None:
    for page in PAGES.values():
        own = re.findall(r'\bid="([^"]+)"', page)
        assert len(own) == len(set(own))
    ids = re.findall(r'\bid="([^"]+)"', HTML)
    script = "\n".join(SCRIPTS.values())
    wanted = set(re.findall(r'(?:byId|copyOf)\("([^"]+)"\)', script))
    wanted |= set(re.findall(r'"((?:flow|ask|figure)-[a-z-]+)"', script))
    assert len(wanted) > 40
    assert wanted <= set(ids)
    parts = set(re.findall(r'data-part="([^"]+)"', HTML))
    assert set(re.findall(r'part\(\w+, "([^"]+)"\)', script)) <= parts
    for label in re.findall(r'(?:aria-labelledby|aria-describedby|for)="([^"]+)"', HTML):
        assert set(label.split()) <= set(ids)


def test_fields_have_names_for_screen_readers() -> None:
    labelled = set(re.findall(r'<label for="([^"]+)"', HTML))
    wrapped = " ".join(re.findall(r"<label[^>]*>.*?</label>", HTML, re.DOTALL))
    for field in re.findall(r'<(?:input|select|textarea)[^>]* ?id="([^"]+)"', HTML):
        assert field in labelled or f'id="{field}"' in wrapped, field


def test_wheel_brings_the_files() -> None:
    (data,) = re.findall(r"^\"\*\" = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    assert {Path(name).suffix for name in FILES} <= {kind.strip('" *') for kind in data.split(",")}

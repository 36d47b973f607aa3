"""Build the documentation site into dist/site: `make docs`.

python -m tools.docs_site
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "build" / "pages"
SITE = ROOT / "dist" / "site"
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
LOADED = re.compile(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"?(https?://[^\s\">]+)[^>]*>")
ALLOWED = re.compile(r"rel=\"?(?:canonical|alternate)")


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages of the site: those of the root, docs, deploy and benchmarks."""
    patterns = ("*.md", "docs/**/*.md", "deploy/**/*.md", "benchmarks/*.md")
    return sorted(page for pattern in patterns for page in root.glob(pattern))


def with_blank_lines(text: str) -> str:
    """Return a page with a blank line before each list and table, which Python-Markdown needs and GitHub does
    not."""

    def block(line: str) -> str:
        if re.match(r"- |\d+\. |  ", line):
            return "list"
        return "table" if line.startswith("|") else ""

    lines: list[str] = []
    in_code = False
    for line in text.splitlines():
        last = lines[-1] if lines else ""
        if not in_code and last and block(line) not in {"", block(last)} and not line.startswith("  "):
            lines.append("")
        in_code ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines) + "\n"


def stage(root: Path, folder: Path) -> None:
    """Copy the pages, and the files that they link to, under the paths of the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in pages(root):
        linked = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
        for source in (page, *linked):
            target = folder / source.relative_to(root)
            if source.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.suffix == ".md":
                    target.write_text(with_blank_lines(source.read_text()))
                else:
                    shutil.copy(source, target)


def loaded_from_elsewhere(text: str) -> list[str]:
    """Return what a page would load from other hosts."""
    return [match[1] for match in LOADED.finditer(text) if not ALLOWED.search(match[0])]


def main() -> int:
    stage(ROOT, STAGED)
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--clean"], cwd=ROOT, check=False
    )
    if built.returncode != 0:
        return built.returncode
    found = {
        f"{page.relative_to(SITE)}: {address}"
        for page in SITE.rglob("*.html")
        for address in loaded_from_elsewhere(page.read_text())
    }
    for line in sorted(found):
        sys.stderr.write(f"loaded from another host: {line}\n")
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())

"""`make setup` unpacks libraries when the user may not install packages."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "mooncake_libs.sh"
LOADED = """
import mooncake.store
from pathlib import Path
print(*{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line})
"""


def test_mooncake_libs_unpacks_debian_libraries_into_folder(tmp_path: Path) -> None:
    folder = tmp_path / "libs"
    ended = subprocess.run(
        [str(SCRIPT), sys.executable, str(folder), "--unpack"], capture_output=True, text=True, check=True
    )
    assert "still lacks" not in ended.stdout, ended.stderr
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED],
        env={"LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ours = {Path(path).name.split(".so")[0] for path in loaded if Path(path).is_relative_to(folder)}
    assert ours >= {"libibverbs", "libnuma", "libcurl"}

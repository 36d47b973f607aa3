"""Make the artefacts of a release from the tag at HEAD, try them, and push them: `make release`.

python -m tools.release build
python -m tools.release try python3.11 python3.13
python -m tools.release push REGISTRY/PATH
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import helm_python

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist" / "release"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
CHARTS = ("tidemill", "tidemill-traffic")
IMAGES = {"cpu": "", "cuda": "-cuda"}
"""The targets of the Dockerfile, and the ends of their images' tags."""

PLATFORM = "manylinux_2_28_x86_64"
SHARED_WITH_TORCH = "libgomp.so.1"
"""The library that stays out of the wheel: torch brings it, and a second copy would start its own threads."""


class NotReleasable(Exception):
    """The tree is not what a release is made of; the message names the fix."""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raises NotReleasable."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotReleasable(f"{' '.join(words[:6])} failed: {(done.stdout + done.stderr)[-2000:].strip()}")
    return done.stdout


def newest_in_changelog(text: str) -> str:
    """Return the first heading: a version, or `Unreleased`."""
    return re.findall(r"^## (\S+)", text, re.MULTILINE)[0]


def tagged_version(root: Path) -> str:
    """Return the version of the tag at HEAD. Raises NotReleasable unless the tree is that of the tag, and
    CHANGELOG.md begins with that version."""
    newest = newest_in_changelog((root / "CHANGELOG.md").read_text())
    if run("git", "status", "--porcelain", cwd=root):
        raise NotReleasable("there are changes that are not committed: commit or remove them")
    tags = run("git", "tag", "--points-at", "HEAD", "--list", "v[0-9]*", cwd=root).split()
    if tags != [f"v{newest}"]:
        found = " and ".join(tags) or "no tag"
        raise NotReleasable(f"HEAD has {found}, and CHANGELOG.md begins with {newest}: git tag v{newest}")
    return newest


def build_python(folder: Path) -> None:
    """Make the source distribution, and from it the wheel with the kernels of each kind of CPU."""
    with tempfile.TemporaryDirectory() as made:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, ROOT)
        [wheel], [source] = Path(made).glob("*.whl"), Path(made).glob("*.tar.gz")
        options = ("--plat", PLATFORM, "--exclude", SHARED_WITH_TORCH, "--wheel-dir", folder)
        run(sys.executable, "-m", "auditwheel", "repair", *options, wheel)
        shutil.copy(source, folder)


def build_charts(folder: Path, version: str) -> list[Path]:
    """Package the charts as `helm package` does, with the version of the release."""
    charts = (ROOT / "deploy" / "helm" / name for name in CHARTS)
    return [
        Path(helm_python.package(chart, destination=folder, version=version, app_version=version))
        for chart in charts
    ]


def build_images(folder: Path, version: str) -> None:
    """Build the images and save each as an archive with an OCI index. Needs a Docker daemon."""
    revision = run("git", "rev-parse", "HEAD").strip()
    for target, suffix in IMAGES.items():
        tag = f"tidemill:{version}{suffix}"
        arguments = ("--build-arg", f"VERSION={version}", "--build-arg", f"REVISION={revision}")
        run(
            "docker",
            "build",
            "-f",
            "deploy/docker/Dockerfile",
            "--target",
            target,
            *arguments,
            "-t",
            tag,
            ".",
        )
        run("docker", "save", "--output", folder / f"tidemill-{version}{suffix}.image.tar", tag)


def has_docker() -> bool:
    """Return whether a Docker daemon answers."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    return subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0


def build() -> None:
    version = tagged_version(ROOT)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir(parents=True)
    build_python(DIST)
    build_charts(DIST, version)
    if has_docker():
        build_images(DIST, version)
    else:
        print("no Docker daemon answers: there are no images in this release")
    files = sorted(DIST.iterdir())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("\n".join(sums))


def try_wheel(python: str) -> str:
    """Install the wheel into an empty environment, run the demo there without a compiler, and return the
    versions that it had. Raises NotReleasable."""
    [wheel] = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as made:  # short, for Ray's sockets
        folder = Path(made)
        run(python, "-m", "venv", folder / "venv")
        own = folder / "venv" / "bin" / "python"
        run(own, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        cache = folder / "cache"
        environ = kept | {"PATH": str(own.parent), "XDG_CACHE_HOME": str(cache), "TMPDIR": made}
        answers = run(own.parent / "tidemill", "demo", cwd=folder, env=environ).splitlines()[-1]
        if any(cache.rglob("*.so")):
            raise NotReleasable("the wheel compiled kernels, which it should have brought")
        own_versions = "; ".join(f"print(metadata.version({name!r}))" for name in ("torch", "ray"))
        script = f"from importlib import metadata; {own_versions}"
        torch_version, ray_version = run(own, "-c", script, cwd=folder).split()
        python_version = run(own, "--version", cwd=folder).split()[1]
    return f"Python {python_version}, torch {torch_version}, Ray {ray_version}: {answers.strip()}"


def push(registry: str, folder: Path, *, plain_http: bool = False) -> list[str]:
    """Push the charts, and the images if there are some, to an OCI registry, and return their names there.
    `docker login` or `helm registry login` has the credentials."""
    pushed: list[str] = []
    for chart in sorted(folder.glob("*.tgz")):
        with helm_python.RegistryClient(plain_http=plain_http) as client:
            client.push(chart, f"oci://{registry}/charts", plain_http=plain_http)
        pushed.append(f"{registry}/charts/{chart.stem}")
    for archive in sorted(folder.glob("*.image.tar")):
        tag = archive.name.removesuffix(".image.tar").replace("-", ":", 1)
        run("docker", "load", "--input", archive)
        run("docker", "tag", tag, f"{registry}/{tag}")
        run("docker", "push", f"{registry}/{tag}")
        pushed.append(f"{registry}/{tag}")
    return pushed


def main() -> int:
    command = argparse.ArgumentParser(prog="python -m tools.release")
    commands = command.add_subparsers(dest="command", required=True)
    commands.add_parser("build")
    commands.add_parser("try").add_argument("pythons", nargs="+")
    commands.add_parser("push").add_argument("registry")
    options = command.parse_args()
    try:
        match options.command:
            case "build":
                build()
            case "try":
                for python in options.pythons:
                    print(try_wheel(python))
            case _:
                print("\n".join(push(options.registry, DIST)))
    except (NotReleasable, helm_python.HelmError) as error:
        sys.stderr.write(f"release: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

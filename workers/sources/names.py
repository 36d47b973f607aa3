"""Names of models: each is a bundled model, a folder of this machine, or a place to download from.

The rules are those of vLLM: a folder that exists comes first, and `org/name` is a repository of the hub.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from tidemill.kvstore.errors import TidemillError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The id of a repository of the hub."""

SCHEME = re.compile(r"([a-z][a-z0-9+]*)://(.+)")
HUB = "hf"
GGUF = "gguf"


class SourceError(TidemillError):
    """A model cannot be found or downloaded. The message is one line with the cause and the fix."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is not a folder. `path` is `org/name` for the hub (scheme `hf`), the path of a GGUF file
    (scheme `gguf`), else what follows the scheme."""

    scheme: str
    path: str
    revision: str | None = None  # branch, tag or commit, of the hub alone; None: its main branch
    download_dir: Path | None = None  # None: the cache of the hub, or that of Tidemill
    file: str | None = None  # of the hub alone: a GGUF file by its name, or by a part of it, such as Q4_K_M

    @property
    def name(self) -> str:
        """The name by which clients call it."""
        if self.scheme == HUB:
            return self.path if self.file is None else f"{self.path}:{self.file}"
        return self.path if self.scheme == GGUF else f"{self.scheme}://{self.path}"

    def pinned(self, folder: Path) -> "ModelSource":
        """Return the source of exactly the files in `folder`, its download, for the other nodes."""
        if self.scheme != HUB:
            return self
        if self.file is not None:  # its links lead to the download
            folder = next(folder.glob("*.gguf")).readlink().parent
        return replace(self, revision=folder.name)


def bundled() -> dict[str, Path]:
    """Return the folder of each bundled model, by name."""
    return {"keeper": Path(__file__).resolve().parents[1] / "models" / "keeper"}


def local_folder(model: str) -> Path:
    """Return the folder of a model that is not downloaded; it may not exist."""
    return bundled().get(model) or Path(model)


def source_of(
    model: str, revision: str | None = None, download_dir: Path | None = None
) -> ModelSource | None:
    """Return where to download a model from; None: it is bundled, or a folder of this machine. Raises
    SourceError."""
    if match := SCHEME.fullmatch(model):
        scheme, path = match.groups()
    elif model.endswith(".gguf") and revision is None:
        return ModelSource(GGUF, str(Path(model).absolute()), None, download_dir)
    elif not local_folder(model).exists() and REPOSITORY.fullmatch(model.partition("@")[0]):
        scheme, path = HUB, model
    else:
        if revision is not None:
            raise SourceError(f"{model} is not downloaded and has no revision: leave out --revision")
        return None
    if scheme == HUB:
        path, _, file = path.partition(":")
        path, _, written = path.partition("@")
        if written and revision not in {None, written}:
            raise SourceError(f"{model} names the revision {written}, --revision {revision}: give one")
        if not REPOSITORY.fullmatch(path):
            raise SourceError(
                f"{model} is not a repository of the hub: write hf://ORG/NAME, or "
                "hf://ORG/NAME:FILE for a GGUF file"
            )
        return ModelSource(HUB, path, written or revision, download_dir, file or None)
    if revision is not None:
        raise SourceError(f"--revision is for models of the Hugging Face hub, not for {model}: leave it out")
    return ModelSource(scheme, path.rstrip("/"), None, download_dir)

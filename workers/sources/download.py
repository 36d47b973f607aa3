"""Download a model into a folder of this machine: once, all of it, and on from where it broke off.

Repositories of the Hugging Face hub go through huggingface_hub, into its own cache: HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE count, and models that other programs have downloaded are found. Other
places are read by fsspec.
"""

# ruff: noqa: PLC0415 - huggingface_hub takes most of a second to import

import errno
from importlib import import_module
from pathlib import Path
from typing import Any

from tidemill.workers.sources.gguf_folder import BESIDE, SUFFIX, shards_of, unpack
from tidemill.workers.sources.names import GGUF, HUB, ModelSource, SourceError
from tidemill.workers.sources.remote_files import download_files

FOLDERS = ("[!1]*/*", "1[!_]*/*", "1_[!P]*/*")
IGNORED = (*FOLDERS, "consolidated*", "*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5")
"""Files of a repository that are not read: copies of the weights in other formats, and folders except
1_Pooling."""


def download(source: ModelSource, *, offline: bool = False) -> Path:
    """Return the folder of the model, which is downloaded unless it is there. With `offline` it must be
    there. Raises SourceError."""
    if source.scheme == GGUF:
        return unpack(Path(source.path), source.download_dir)
    try:
        if source.scheme != HUB:
            return download_files(source, offline)
        folder = _from_hub(source, offline=offline)
        return folder if source.file is None else unpack(_only(folder, source))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SourceError(
                f"no space is left for {source.name}: free some, or give another --download-dir"
            ) from error
        raise SourceError(f"{source.name} cannot be downloaded: {error}") from error


def _from_hub(source: ModelSource, *, offline: bool) -> Path:
    from huggingface_hub import constants, errors

    hub: Any = import_module("huggingface_hub")  # its types are too wide for a checker
    name, place = source.path, constants.ENDPOINT
    try:
        return Path(
            hub.snapshot_download(
                name,
                revision=source.revision,
                cache_dir=_cache(source),
                **_patterns(source.file),
                local_files_only=offline,
            )
        )
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{name} is gated: accept its terms at {place}/{name}, and set HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"there is no model {name} at {place}, and no folder {name} here: correct the name, or set "
            "HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{name} at {place} has no revision {source.revision}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if offline:
            raise SourceError(
                f"{name} has not been downloaded: `hf download {name}` does it, and so does `tidemill serve`"
            ) from error
        raise SourceError(
            f"{place} cannot be reached, and {name} is not in the cache {_cache(source)}: look at the "
            "network and HF_ENDPOINT, or give the path of a folder"
        ) from error
    except OSError:
        raise
    except Exception as error:  # of the HTTP client, which is another one in each version
        [line, *_] = str(error).strip().splitlines() or [type(error).__name__]
        raise SourceError(
            f"the download of {name} from {place} broke off ({line}): the same command goes on from there"
        ) from error


def _patterns(file: str | None) -> dict[str, list[str]]:
    """Return the patterns of the files to download: the model's folder, or a GGUF file."""
    if file is None:
        return {"ignore_patterns": list(IGNORED)}
    return {"allow_patterns": [*_gguf(file), *BESIDE], "ignore_patterns": list(FOLDERS)}


def _gguf(file: str) -> list[str]:
    return shards_of(file) if file.endswith(SUFFIX) else [f"*{file}*{SUFFIX}"]


def _only(folder: Path, source: ModelSource) -> Path:
    """Return the first file of the one model in a download. Raises SourceError."""
    assert source.file is not None
    found = sorted({path for pattern in _gguf(source.file) for path in folder.glob(pattern)})
    if not found or {path.name for path in found} != set(shards_of(found[0].name)):
        names = ", ".join(path.name for path in found) or "no GGUF file of this name"
        raise SourceError(f"{source.path} has {names}: write hf://{source.path}:FILE with the name of one")
    return found[0]


def _cache(source: ModelSource) -> Path:
    from huggingface_hub import constants

    return source.download_dir or Path(constants.HF_HUB_CACHE)

"""The identity of an engine's weights: pages of other weights are other bytes under the same tokens."""

import re
from hashlib import blake2b
from pathlib import Path

import xxhash

from tidemill.connect.groups import Unsupported

SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
CHUNK_BYTES = 16 << 20
_BLOB = re.compile(r"[0-9a-f]{64}")


def fingerprint(model: str, revision: str | None) -> str:
    """Digest the weights of a folder, a file, or a name in the cache of Hugging Face: every byte, or the
    digests by which that cache names its files. Blocking. Raises Unsupported."""
    files = sorted(path for path in _files(model, revision) if path.suffix in SUFFIXES)
    if not files:
        raise Unsupported(
            f"the weights of {model} are in no folder of this host: add to kv_connector_extra_config a "
            "weights_id, a name that changes with every change of the weights"
        )
    lines = [f"{path.name} {path.stat().st_size} {_digest(path)}" for path in files]
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _files(model: str, revision: str | None) -> list[Path]:
    if Path(model).exists():
        return list(Path(model).iterdir()) if Path(model).is_dir() else [Path(model)]
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - for names alone
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return list(Path(snapshot_download(model, revision=revision, local_files_only=True)).iterdir())
    except (HFValidationError, LocalEntryNotFoundError):
        return []


def _digest(path: Path) -> str:
    blob = path.resolve().name
    if _BLOB.fullmatch(blob):
        return blob
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()

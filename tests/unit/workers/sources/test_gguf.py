"""GGUF files, also hostile ones: a header that is read, or an error in one line."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.workers.sources.download import download
from tidemill.workers.sources.gguf_folder import shards_of, unpack
from tidemill.workers.sources.gguf_header import BLOCK_KINDS, read_header
from tidemill.workers.sources.names import ModelSource, SourceError, source_of


def write(path: Path, **metadata: Any) -> Path:  # noqa: ANN401 - as the library takes it
    """Write a file with one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    for name, value in metadata.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "a.gguf").read_bytes()


def test_header_is_read(tmp_path: Path) -> None:
    file = read_header(write(tmp_path / "a.gguf", flag=True, big=1 << 30, text="ö"))
    found = {key: file.metadata[key] for key in ("flag", "big", "text")}
    assert found == {"flag": True, "big": 1 << 30, "text": "ö"}
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    tensor = file.tensors["token_embd.weight"]
    assert (tensor.kind.name, tensor.shape) == ("F32", (3, 4))
    values = np.frombuffer(file.mapped, np.float32, 12, tensor.start_byte)
    assert values.tolist() == list(range(12))


def test_kinds_are_those_of_the_library() -> None:
    sizes = gguf.GGML_QUANT_SIZES
    for number, kind in BLOCK_KINDS.items():
        assert sizes[gguf.GGMLQuantizationType(number)] == (kind.elements, kind.num_bytes)
        assert gguf.GGMLQuantizationType(number).name == kind.name


@pytest.mark.parametrize(
    ("place", "new", "message"),
    [
        (0, b"GGML", "damaged or cut short .*version 3; GGUF in versions 2 and 3"),
        (4, struct.pack("<I", 1), "version 1"),
        (8, struct.pack("<Q", 1 << 60), "damaged or cut short"),
        (16, struct.pack("<Q", 1 << 60), "damaged or cut short"),
        (24, struct.pack("<Q", (1 << 64) - 1), "bytes from byte 32 on"),
    ],
)
def test_damaged_header_is_one_line(
    content: bytes, tmp_path: Path, place: int, new: bytes, message: str
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content[:place] + new + content[place + len(new) :])
    with pytest.raises(SourceError, match=message) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


@given(place=st.integers(0, 399), new=st.binary(min_size=1, max_size=8), end=st.integers(0, 500))
def test_any_damage_is_an_error_or_a_header(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, place: int, new: bytes, end: int
) -> None:
    path = tmp_path_factory.mktemp("a") / "a.gguf"
    path.write_bytes((content[:place] + new + content[place + len(new) :])[:end])
    try:
        file = read_header(path)
    except SourceError:
        return
    for tensor in file.tensors.values():
        assert tensor.start_byte + tensor.num_bytes <= len(file.mapped)


def test_file_cut_in_its_tensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content[:-40])
    with pytest.raises(SourceError, match=r"token_embd.weight ends behind the end of the file.*download it"):
        read_header(tmp_path / "a.gguf")


def test_missing_file_and_unknown_architecture_are_refused(tmp_path: Path) -> None:
    source = source_of(str(tmp_path / "none.gguf"))
    assert source is not None
    with pytest.raises(SourceError, match=r"none.gguf cannot be opened \(.*No such file"):
        download(source)
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(SourceError, match=r"a.gguf is a mamba: GGUF files are served of llama, "):
        unpack(path, tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.ssm.inner_size": 8},
        {"tokenizer.ggml.token_type": 3},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": ["a"]},
    ],
)
def test_damaged_metadata_are_one_line(tmp_path: Path, metadata: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"a.gguf has damaged metadata \(.*download it again$"):
        unpack(write(tmp_path / "a.gguf", **metadata), tmp_path / "cache")


def test_all_shards_are_opened(tmp_path: Path) -> None:
    assert shards_of("m-00002-of-00003.gguf") == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert shards_of("m.gguf") == ["m.gguf"]
    path = write(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(SourceError, match=r"m-00002-of-00002.gguf cannot be opened"):
        unpack(path, tmp_path)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/a/b.gguf", ModelSource("gguf", "/a/b.gguf")),
        ("hf://org/name:b.gguf", ModelSource("hf", "org/name", file="b.gguf")),
        ("hf://org/name@v1:Q4_K_M", ModelSource("hf", "org/name", "v1", file="Q4_K_M")),
    ],
)
def test_name_of_a_file(model: str, expected: ModelSource) -> None:
    assert source_of(model) == expected

"""Loading a model folder: what the engine learns of it, and one clear line for what can be wrong."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest
import torch
from safetensors.torch import load_file, save_file

from tidemill.kernels.dispatch import REFERENCE
from tidemill.kernels.shared.fp8 import Fp8
from tidemill.kernels.shared.rows import integers
from tidemill.kvstore.layout import Attention, Linear, layout_of
from tidemill.workers.models.architectures.config import weights_of
from tidemill.workers.models.architectures.qwen3_next import parse
from tidemill.workers.models.architectures.registry import LoadedModel, describe, load, no_progress
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.inputs import caches_of
from tidemill.workers.models.loading.kv_scales import KvScales

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4,
    "decoder_sparse_step": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
    "rope_theta": 10000.0,
}
Edit = Callable[[dict[str, torch.Tensor]], object]
ROUTER = "model.layers.1.mlp.gate.weight"


def load_folder(folder: Path) -> LoadedModel:
    return load(folder, REFERENCE, no_progress)


def write_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model: one linear and one attention layer, the second a mixture of experts."""
    draw = torch.Generator().manual_seed(0)
    weights = weights_of(parse(CONFIG))
    save_file(
        {name: torch.randn(weight.shape, generator=draw) for name, weight in weights.items()},
        tmp_path / "model.safetensors",
    )
    write_config(tmp_path)
    return tmp_path


def test_loaded_model_has_the_facts_for_the_engine(folder: Path) -> None:
    model = load_folder(folder)
    assert model.layers == (
        Linear(key_heads=1, value_heads=2, key_dim=4, value_dim=4, conv_width=4),
        Attention(kv_heads=1, head_dim=8),
    )
    assert (model.vocab_size, model.max_length, model.eos_ids) == (11, 128, frozenset({7}))
    assert model.model.logits(torch.ones(3, 8)).shape == (3, 11)
    assert describe(folder) == (model.layers, model.max_length)


def test_progress_ends_near_the_size_of_the_files(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(folder, REFERENCE, lambda done, total: seen.append((done, total)))
    tensors = load_file(folder / "model.safetensors").values()
    done = [done for done, _ in seen]
    assert done == sorted(done)
    assert done[-1] == sum(tensor.nbytes for tensor in tensors)
    assert {total for _, total in seen} == {(folder / "model.safetensors").stat().st_size}


def test_answer_ends_with_any_id_that_the_folder_names(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4, -1, 99999]}')  # two are no tokens
    assert load_folder(folder).eos_ids == {3, 4, 7}
    (folder / "generation_config.json").write_text("{}")
    assert load_folder(folder).eos_ids == {7}
    write_config(folder, eos_token_id=None, text_config=7)
    names = json.dumps({"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"2": {"content": "</s>"}}})
    (folder / "tokenizer_config.json").write_text(names)
    assert load_folder(folder).eos_ids == {2}
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "</s>"}]}')
    assert load_folder(folder).eos_ids == {5}


def test_shards_give_the_same_model_as_one_file(folder: Path) -> None:
    whole = load_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shard_of = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for shard in set(shard_of.values()):
        save_file({name: tensors[name] for name in names if shard_of[name] == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    sharded = load_folder(folder)
    assert sharded.fingerprint == whole.fingerprint
    hidden = torch.ones(1, 8)
    assert torch.equal(sharded.model.logits(hidden), whole.model.logits(hidden))
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model-2-of-2\.safetensors: model.* names it; download"):
        load_folder(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json has no weight_map: download"):
        load_folder(folder)


def swap_norms(tensors: dict[str, torch.Tensor]) -> None:
    first, second = (f"model.layers.{index}.input_layernorm.weight" for index in range(2))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def test_fingerprint_covers_weights_and_config_but_no_remarks(folder: Path) -> None:
    first = load_folder(folder).fingerprint
    write_config(folder, transformers_version="9", eos_token_id=1)
    assert load_folder(folder).fingerprint == first
    write_config(folder, rms_norm_eps=1e-5)
    assert load_folder(folder).fingerprint != first
    write_config(folder)
    edit_tensors(folder, swap_norms)
    assert load_folder(folder).fingerprint != first
    edit_tensors(folder, swap_norms)
    assert load_folder(folder).fingerprint == first
    edit_tensors(folder, lambda tensors: tensors[ROUTER][0, 0].add_(1e-3))
    assert load_folder(folder).fingerprint != first


def test_draft_layer_is_left_alone_and_embeddings_are_tied(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(8)}))
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    write_config(folder, tie_word_embeddings=True)
    model = load_folder(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.allclose(model.model.logits(torch.eye(8)), embedding.T)


CONFIGS: list[tuple[dict[str, object], str]] = [
    (
        {"architectures": ["BloomForCausalLM"]},
        "is a BloomForCausalLM: supported are .*LlamaForCausalLM, .*Qwen3NextForCausalLM",
    ),
    ({"architectures": None}, "is a unknown: supported are"),
    ({"hidden_size": None}, "hidden_size is None: a positive number is needed"),
    ({"hidden_size": "8"}, "hidden_size is '8': give 0 to"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: give 0 to 2048"),
    ({"num_experts": 10**9}, "num_experts is 1000000000: give 0 to 2048"),
    ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776: give 0 to"),
    ({"head_dim": -8}, "head_dim is -8: give 0 to"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x': a number is needed"),
    ({"rope_theta": float("nan")}, "rope_theta is nan: a finite number is needed"),
    ({"rope_scaling": ["yarn"]}, r"rope_scaling is \['yarn'\]: an object is needed"),
    ({"rope_scaling": {"type": [7]}}, r"rope type \[7\]: supported are"),
    ({"layer_types": 7}, "layer_types is no list of names"),
    ({"layer_types": [{}, {}]}, "layer_types is no list of names"),
    ({"architectures": [{}]}, r"is a \{\}: supported are"),
    ({"architectures": 7}, r"config.json cannot be used \(TypeError: .*: download the model again"),
    ({"mlp_only_layers": [[]]}, r"config.json cannot be used \(TypeError: .*: download the model again"),
    ({"quantization_config": 7}, r"quantization_config of config.json is damaged .*: download"),
    ({"hidden_act": "gelu"}, "only silu is supported"),
    ({"rope_scaling": {"type": "longrope"}}, "'longrope' rotates a text .* pages .*: supported are default,"),
    ({"rope_scaling": {"type": "other"}}, "rope type 'other': supported are default,"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    ({"layer_types": ["mamba", "full_attention"]}, r"\['mamba'\]: not supported"),
    ({"num_attention_heads": 3, "num_key_value_heads": 2}, "no multiple of num_key_value_heads"),
    ({"vocab_size": 12}, r"embed_tokens.weight has shape \(11, 8\) but config.json asks for \(12, 8\)"),
    (
        {"mlp_only_layers": [1]},
        "lacks tensors model.layers.1.mlp.down_proj.weight, .* belong to different",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS)
def test_errors_in_config_json(folder: Path, changes: dict[str, object], message: str) -> None:
    write_config(folder, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_folder(folder)
    assert "\n" not in str(caught.value)


MISFITS: list[tuple[Edit, str]] = [
    (lambda tensors: tensors.pop(ROUTER), f"lacks tensor {ROUTER}"),
    (lambda tensors: tensors.update(extra=torch.ones(2)), "has unexpected tensor extra"),
    (lambda tensors: tensors.update({ROUTER: torch.ones(2, 9)}), rf"{ROUTER} has shape \(2, 9\) .* \(2, 8\)"),
    (
        lambda tensors: tensors.update({ROUTER: torch.ones(2, 8).to(torch.int8)}),
        f"{ROUTER} is I8 but BF16 or F16 or F32 is needed: use a checkpoint",
    ),
]


@pytest.mark.parametrize(("edit", "message"), MISFITS, ids=["missing", "extra", "wrong shape", "quantised"])
def test_tensors_that_do_not_fit(folder: Path, edit: Edit, message: str) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(ModelError, match=message):
        load_folder(folder)
    with pytest.raises(ModelError, match=message):
        describe(folder)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\x00" * 40 + data[48:])


def lie_about_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


@pytest.mark.parametrize("damage", [cut_short, empty, damage_header, lie_about_header])
def test_damaged_weights(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short .* download it again"):
        load_folder(folder)


def test_files_that_are_not_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        load_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_folder(folder)
    with pytest.raises(ModelError, match=r"there is no model folder .* or one of keeper"):
        load_folder(folder / "nowhere")


def shard_names(*names: object) -> str:
    return json.dumps({"weight_map": {str(number): name for number, name in enumerate(names)}})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"vocab_size": ' + "1" * 6000 + "}", "is not valid JSON"),
        ("config.json", "[" * 100_000, "is not valid JSON"),
        ("config.json", "\ud800", "cannot be used"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', "cannot be used"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "cannot be used"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', "has no weight_map"),
        ("model.safetensors.index.json", shard_names("/etc/passwd"), "not below the folder"),
        ("model.safetensors.index.json", shard_names("a/../../b"), "not below the folder"),
    ],
)
def test_file_of_any_content_is_an_error_in_one_line(
    folder: Path, name: str, content: str, message: str
) -> None:
    (folder / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ModelError, match=message) as refused:
        load_folder(folder)
    assert name in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    with pytest.raises(ModelError, match=f"{name} cannot be used .*(not a regular file|directory)"):
        load_folder(folder)


def test_many_tensors_without_bytes_are_named_soon(folder: Path) -> None:
    header = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(100_000)}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    start_s = monotonic()
    with pytest.raises(ModelError, match="lacks tensors"):
        load_folder(folder)
    assert monotonic() - start_s < 20


def test_weights_that_are_no_numbers_are_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors[ROUTER][1, 3:5].fill_(torch.inf))
    load_folder(folder)
    edit_tensors(folder, lambda tensors: tensors[ROUTER][1, 3].fill_(torch.nan))
    with pytest.raises(ModelError, match=f"the tensor {ROUTER} holds NaN: download"):
        load_folder(folder)


def test_head_that_differs_from_tied_embeddings_is_used(folder: Path) -> None:
    write_config(folder, tie_word_embeddings=True)
    other, tied = load_folder(folder), load_file(folder / "model.safetensors")
    assert torch.allclose(other.model.logits(torch.eye(8)), tied["lm_head.weight"].T)
    embedding = tied["model.embed_tokens.weight"]
    edit_tensors(folder, lambda found: found.update({"lm_head.weight": embedding.clone()}))
    copy = load_folder(folder)
    edit_tensors(folder, lambda found: found.pop("lm_head.weight"))
    alone = load_folder(folder)
    assert torch.allclose(copy.model.logits(torch.eye(8)), embedding.T)
    assert copy.fingerprint == alone.fingerprint != other.fingerprint


ATTENTION = "model.layers.1.self_attn."


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_scales_of_keys_and_values_are_rounded_up_to_powers_of_two(
    folder: Path, names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tidemill")

    def loaded() -> LoadedModel:
        return load(folder, REFERENCE, no_progress, fixed_kv_scales=True)

    write_config(folder, quantization_config={"quant_method": "fp8"})
    bare = loaded()
    assert bare.kv_scales == (KvScales(),)
    assert "0 of 1 layers have scales in the folder, others 1" in caplog.text
    key, value = (ATTENTION + name for name in names)
    scales = {key: torch.tensor(0.25), value: torch.tensor([0.3])}
    edit_tensors(folder, lambda tensors: tensors.update(scales))
    assert loaded().kv_scales == (KvScales(125, 126),)
    assert "1 of 1 layers have scales" in caplog.text
    assert loaded().fingerprint != bare.fingerprint
    assert load_folder(folder).kv_scales == ()
    pages = _attention_pages(loaded())
    assert [set(integers(pages.scales[:, :, part].flatten())) for part in range(2)] == [{125}, {126}]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_scale_that_is_not_one_positive_number_is_named(folder: Path, scale: float | list[float]) -> None:
    write_config(folder, quantization_config={"quant_method": "fp8"})
    edit_tensors(folder, lambda tensors: tensors.update({f"{ATTENTION}v_scale": torch.tensor(scale)}))
    assert load_folder(folder).kv_scales == ()
    with pytest.raises(ModelError, match="v_scale is not one positive number: set --kv-cache-dtype"):
        load(folder, REFERENCE, no_progress, fixed_kv_scales=True)


def _attention_pages(loaded: LoadedModel) -> Fp8:
    layout = layout_of(loaded.local_layers, 4, "fp8")
    arena = torch.zeros(layout.extent_bytes, dtype=torch.uint8)
    (pages,) = caches_of(layout, arena, loaded.kv_scales).kv
    assert isinstance(pages, Fp8)
    return pages

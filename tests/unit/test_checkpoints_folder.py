"""Checkpoints that must be refused before anything is written, and what the message names. Nothing is faked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.folder import open_checkpoint, other_files
from services.weight_sync.checkpoints.header import NewTensor, make_header, read_shard
from services.weight_sync.checkpoints.weights import open_directory
from services.weight_sync.layout import CHANNEL, TENSOR, Scaling
from tests.checkpoints import GLM_FP8, INDEX, R1_FP8, TENSOR_FP8, fp8_pair, save_checkpoint, with_strategy

NAME = "model.layers.0.mlp.up_proj.weight"
Header = dict[str, Any]


def two_shards(directory: Path) -> Path:
    shards = [{"a": torch.ones(3, 5), "b": torch.ones(4, dtype=torch.bfloat16)}, {"c": torch.ones(2)}]
    return save_checkpoint(directory, shards, {"model_type": "llama"})


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_directory(directory)
    return str(caught.value)


def rewrite(file: Path, change: Callable[[Header], object]) -> None:
    """Change the header of a safetensors file; its data stays."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def change_index(directory: Path, **names: str | None) -> None:
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"] |= names
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if file}
    (directory / INDEX).write_text(json.dumps(content))


def test_tensors_are_found_where_safetensors_puts_them(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(two_shards(tmp_path))
    found = {name: (one.dtype, one.shape) for name, one in checkpoint.tensors.items()}
    assert found == {"a": ("F32", (3, 5)), "b": ("BF16", (4,)), "c": ("F32", (2,))}
    a = checkpoint.tensors["a"]
    stored = a.file.read_bytes()[a.begin : a.begin + a.size_bytes]
    assert stored == torch.ones(15).numpy().tobytes()
    assert checkpoint.indexed and [shard.file.name for shard in checkpoint.shards] == sorted(
        file.name for file in tmp_path.glob("*.safetensors")
    )


def test_the_header_that_is_written_is_aligned_and_read_back(tmp_path: Path) -> None:
    tensors = [NewTensor("x", "F8_E4M3", (3, 7)), NewTensor("s", "F32", (1, 1)), NewTensor("ü", "BF16", (5,))]
    header, offsets = make_header(tensors)
    (tmp_path / "f").write_bytes(header + bytes(21 + 4 + 10))
    shard = read_shard(tmp_path / "f")
    assert len(header) % 8 == 0
    assert [(one.name, one.begin) for one in shard.entries] == list(offsets.items())
    assert all(one.begin % (one.size_bytes // max(1, torch.Size(one.shape).numel())) == 0 for one in shard.entries)


@pytest.mark.parametrize("cut", [1, 3, 8, 60, "header"])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int | str) -> None:
    file = two_shards(tmp_path) / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:20] if cut == "header" else data[: -int(cut)])
    assert str(file) in refusal(tmp_path) and "truncated" in refusal(tmp_path)


CASES: dict[str, tuple[Callable[[Header], object], str]] = {
    "overlap": (lambda header: header["b"].update(data_offsets=[56, 64]), "b overlaps"),
    "gap": (lambda header: header["b"].update(data_offsets=[62, 70]), "b leaves a gap"),
    "size": (lambda header: header["a"].update(shape=[3, 4]), "48 bytes, and its data_offsets span 60"),
    "dtype": (lambda header: header["a"].update(dtype="F4"), "unknown dtype F4"),
    "negative": (lambda header: header["a"].update(shape=[-3, -5]), "no dtype, shape and data_offsets for a"),
    "missing field": (lambda header: header["a"].pop("shape"), "no dtype, shape and data_offsets for a"),
    "dropped tensor": (lambda header: header.pop("b"), "too long"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_header_is_refused(tmp_path: Path, case: str) -> None:
    file = two_shards(tmp_path) / "model-00001-of-00002.safetensors"
    change, message = CASES[case]
    rewrite(file, change)
    assert str(file) in refusal(tmp_path) and message in refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"__metadata__":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":"","data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[' + "9" * 5000 + '],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[' + "9" * 4000 + '],"data_offsets":[0,4]}}',
        '{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
    ids=["deep", "dtype", "shape", "digits", "large", "surrogate"],
)
def test_headers_made_to_hurt_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(4))
    with pytest.raises(CheckpointError, match=str(file)):
        read_shard(file)


@pytest.mark.parametrize(
    "text", ['{"a":' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":' + "9" * 5000 + "}", '"\\ud800"']
)
def test_configs_made_to_hurt_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not"):
        open_checkpoint(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_shard(file)


def test_a_header_that_is_no_json_or_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    file = two_shards(tmp_path) / "model-00002-of-00002.safetensors"
    for text in (b"{...", b"[1]", b'{"c": 1, "c": 2}', b"\xff\xfe"):
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        assert str(file) in refusal(tmp_path)
    file.write_bytes((1 << 62).to_bytes(8, "little") + bytes(100))
    assert "truncated" in refusal(tmp_path)


def test_index_and_files_that_disagree_are_refused(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    change_index(two_shards(tmp_path), d=first)
    assert "says that d is in" in refusal(tmp_path)
    change_index(two_shards(tmp_path), a=second)
    assert "says that a is in" in refusal(tmp_path)
    change_index(two_shards(tmp_path), b=None)
    assert "has b, which is not in" in refusal(tmp_path)
    change_index(two_shards(tmp_path), e="model-00003-of-00003.safetensors")
    assert "model-00003-of-00003.safetensors is missing" in refusal(tmp_path)
    change_index(two_shards(tmp_path), e="../x.safetensors")
    assert "no safetensors file beside it" in refusal(tmp_path)


def test_missing_and_surplus_files_are_refused(tmp_path: Path) -> None:
    (two_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(tmp_path)
    two_shards(tmp_path)
    (tmp_path / "extra.safetensors").write_bytes(b"")
    assert "extra.safetensors is not in the index" in refusal(tmp_path)
    (tmp_path / "extra.safetensors").unlink()
    (tmp_path / INDEX).unlink()
    assert "model.safetensors is missing, and so is" in refusal(tmp_path)
    two_shards(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json is missing" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in refusal(tmp_path)
    assert "is not a directory" in refusal(tmp_path / "nowhere")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, [{"a": torch.ones(2), "c": torch.ones(2)}, {"b": torch.ones(2), "a": torch.ones(2)}], {})
    assert "a is in" in refusal(tmp_path)


def test_other_files_are_all_but_weights_and_config(tmp_path: Path) -> None:
    two_shards(tmp_path)
    names = ("tokenizer.json", "chat_template.jinja", "modeling.py", "code/more.py", "LICENSE", ".gitattributes")
    left = ("pytorch_model.bin", "original/x.pth", "pytorch_model.bin.index.json", ".cache/x.metadata", "m.gguf")
    for name in (*names, *left):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert {str(path) for path in other_files(tmp_path)} == set(names)


def test_links_to_nothing_and_in_circles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match="link to nothing"):
        other_files(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "up").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="a folder that it lies in"):
        other_files(tmp_path)


def fp8(directory: Path, quantization: Header | None, **changes: torch.Tensor | None) -> Path:
    """A checkpoint of one fp8 matrix in a file and its scale in another; a change of None takes a tensor away."""
    block = (128, 128) if (quantization or {}).get("weight_block_size") else (1, 0)
    suffix = "_scale_inv" if block == (128, 128) else "_scale"
    tensors = fp8_pair(NAME, torch.randn(200, 130), block, suffix)
    names = {"values": NAME, "scale": NAME + suffix}
    tensors |= {names.get(name, name): tensor for name, tensor in changes.items() if tensor is not None}
    for name in (names[one] for one, tensor in changes.items() if tensor is None):
        del tensors[name]
    shards = [{NAME: tensors.pop(NAME)} if NAME in tensors else {"x": torch.ones(1)}, tensors or {"y": torch.ones(1)}]
    config = {"model_type": "llama", **({"quantization_config": quantization} if quantization else {})}
    return save_checkpoint(directory, shards, config)


def test_scales_are_found_in_another_file(tmp_path: Path) -> None:
    contents = open_directory(fp8(tmp_path, R1_FP8))
    scale = contents.weights[NAME].scale
    assert scale is not None and scale.scaling == Scaling(128, 128)
    assert scale.entry.name == f"{NAME}_scale_inv" and scale.entry.file != contents.weights[NAME].entry.file
    assert set(contents.scales) == {scale.entry.name}


@pytest.mark.parametrize(
    ("quantization", "scaling", "shape"),
    [
        (R1_FP8, Scaling(128, 128), (2, 2)),
        (GLM_FP8, CHANNEL, (200, 1)),
        (with_strategy("tensor"), TENSOR, (1,)),
        (with_strategy("tensor"), TENSOR, ()),
        (with_strategy("block", block_structure=[64, 32]), Scaling(64, 32), (4, 5)),
        (TENSOR_FP8, TENSOR, (1,)),
        (TENSOR_FP8, TENSOR, ()),
    ],
)
def test_formats_are_understood(tmp_path: Path, quantization: Header, scaling: Scaling, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        contents = open_directory(fp8(tmp_path, quantization, scale=torch.ones(shape, dtype=dtype)))
        assert contents.format is not None and contents.format.scaling == scaling
    nested = {"model_type": "x", "text_config": {"model_type": "llama", "quantization_config": quantization}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    contents = open_directory(tmp_path)
    assert contents.format is not None and contents.format.scaling == scaling


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method is 'awq'"),
        ({}, "quant_method is None"),
        ({**R1_FP8, "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({**R1_FP8, "store_dtype": "mxfp4"}, "quantization_config.store_dtype is 'mxfp4'"),
        ({**R1_FP8, "weight_block_size": [128]}, "quantization_config.weight_block_size is [128]"),
        ({**R1_FP8, "weight_block_size": [128, 0]}, "quantization_config.weight_block_size"),
        ({**R1_FP8, "modules_to_not_convert": "lm_head"}, "quantization_config.modules_to_not_convert"),
        ({**GLM_FP8, "format": "pack-quantized"}, "quantization_config.format is 'pack-quantized'"),
        ({**GLM_FP8, "config_groups": {}}, "quantization_config.config_groups"),
        ({**GLM_FP8, "ignore": ["re:("]}, "quantization_config.ignore"),
        ({**GLM_FP8, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format is 'sparse-24'"),
        (with_strategy("channel", num_bits=4), "config_groups.group_0.weights.num_bits is 4"),
        (with_strategy("channel", type="int"), "weights.type is 'int'"),
        (with_strategy("channel", symmetric=False), "weights.symmetric is False"),
        (with_strategy("channel", dynamic=True), "weights.dynamic is True"),
        (with_strategy("group", group_size=128), "weights.strategy is 'group'"),
        (with_strategy("block"), "weights.block_structure is None"),
        (
            {**GLM_FP8, "config_groups": {**GLM_FP8["config_groups"], "group_1": {"weights": None}}},
            "group_1.weights.num_bits",
        ),
        (
            {
                **GLM_FP8,
                "config_groups": {
                    **GLM_FP8["config_groups"],
                    "group_1": with_strategy("tensor")["config_groups"]["group_0"],
                },
            },
            "quantization_config.config_groups",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_field(tmp_path: Path, quantization: Header, field: str) -> None:
    save_checkpoint(tmp_path, [{"a": torch.ones(1)}], {"quantization_config": quantization})
    assert field in refusal(tmp_path) and "config.json" in refusal(tmp_path)


def test_scales_and_matrices_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    scale, first, second = f"{NAME}_scale_inv", "00001-of-00002", "00002-of-00002"
    for changes, file, words in (
        ({"scale": None}, first, f"its scale {scale} is missing"),
        ({"scale": torch.ones(2, 1)}, second, f"{scale} is F32 [2, 1]"),
        ({"scale": torch.ones(2, 2, dtype=torch.int32)}, second, f"{scale} is I32"),
        ({"values": None}, second, f"{scale} is a scale without"),
        ({"values": torch.ones(200, 130)}, second, f"{scale} is a scale without"),
        ({"values": torch.ones(200, 130).to(torch.float8_e5m2)}, first, f"{NAME} is F8_E5M2"),
        ({"values": torch.ones(2, 100, 130).to(torch.float8_e4m3fn)}, first, "not a matrix"),
        ({"b.weight_scale": torch.ones(1)}, second, "b.weight_scale is a scale without"),
    ):
        message = refusal(fp8(tmp_path, R1_FP8, **changes))
        assert file in message and words in message
    assert "has no quantization_config" in refusal(fp8(tmp_path, None))
    assert "a scale without" in refusal(fp8(tmp_path, None, values=torch.ones(200, 130)))


def test_scales_of_activations_are_no_weights(tmp_path: Path) -> None:
    fp8(tmp_path, TENSOR_FP8, scale=torch.ones(1), **{"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)})
    assert set(open_directory(tmp_path).weights) == {NAME}

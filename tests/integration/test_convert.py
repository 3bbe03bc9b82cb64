"""`flotilla convert` on small checkpoints: every format, and what is refused. Nothing is faked."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.weight_sync.checkpoints import strips
from tests.checkpoints import (
    GLM_FP8,
    R1_FP8,
    TENSOR_FP8,
    codes_of,
    files_of,
    fp8_pair,
    load_checkpoint,
    oracle_dequantize,
    oracle_quantize,
    random_matrix,
    read_config,
    save_checkpoint,
    with_strategy,
)
from tests.conversions import CONFIG, bf16_checkpoint, matrices, plain_tensors, refused, run, to_bf16, to_fp8

STRATEGIES = {"block": (128, 128), "channel": (1, 0), "tensor": (0, 0)}
SUFFIX = {"block": "_scale_inv", "channel": "_scale", "tensor": "_scale"}


def fp8_checkpoint(directory: Path, quantization: dict[str, Any], block: tuple[int, int]) -> Path:
    """All scales are in another file than their matrices."""
    suffix = "_scale_inv" if quantization.get("weight_block_size") else "_scale"
    pairs = {key: one for name, x in matrices().items() for key, one in fp8_pair(name, x, block, suffix).items()}
    scales = {name: one for name, one in pairs.items() if name.endswith(suffix)}
    values = {name: one for name, one in pairs.items() if name not in scales}
    config = {**CONFIG, "quantization_config": quantization}
    return save_checkpoint(directory, [{**values, **plain_tensors()}, scales], config)


def dequantised(block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What `fp8_checkpoint` means, in float32."""
    pairs = {name: oracle_quantize(x, block) for name, x in matrices().items()}
    return {name: torch.from_numpy(oracle_dequantize(*pair, block)) for name, pair in pairs.items()}


def check_fp8(directory: Path, source: dict[str, torch.Tensor], strategy: str, **options: Any) -> None:
    """Every byte as the oracle has it."""
    made, block = load_checkpoint(directory), options.pop("block", STRATEGIES[strategy])
    for name, x in source.items():
        codes, scales = oracle_quantize(x, block, **options)
        found = made.pop(name), made.pop(name + SUFFIX[strategy])
        assert found[1].shape == ((1,) if strategy == "tensor" else scales.shape)
        np.testing.assert_array_equal(found[1].numpy().reshape(scales.shape), scales, name)
        np.testing.assert_array_equal(codes_of(found[0]), codes, name)
    check_plain(made)


def check_plain(made: dict[str, torch.Tensor]) -> None:
    assert made.keys() == plain_tensors().keys()
    for name, tensor in plain_tensors().items():
        assert made[name].dtype == tensor.dtype and torch.equal(made[name], tensor), name


# ----------------------------------------------------------------------------------------------------------- formats


@pytest.fixture(params=[strips.STRIP_BYTES, 1], ids=["whole", "block by block"])
def strip_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of tests fit into one strip; once more with as many as there can be."""
    monkeypatch.setattr(strips, "STRIP_BYTES", request.param)


@pytest.mark.usefixtures("strip_bytes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_to_fp8_byte_by_byte(tmp_path: Path, strategy: str, dtype: torch.dtype) -> None:
    done = to_fp8(bf16_checkpoint(tmp_path / "a", dtype), tmp_path / "b", strategy)
    assert done.exit_code == 0 and "4 matrices quantised, 0 dequantised, 7 copied" in done.output
    check_fp8(tmp_path / "b", matrices(dtype), strategy)


@pytest.mark.usefixtures("strip_bytes")
def test_other_blocks_and_powers_of_two(tmp_path: Path) -> None:
    bf16_checkpoint(tmp_path / "a")
    assert to_fp8(tmp_path / "a", tmp_path / "b", "block", "--block-size", 64, 64).exit_code == 0
    check_fp8(tmp_path / "b", matrices(), "block", block=(64, 64))
    assert read_config(tmp_path / "b")["quantization_config"]["weight_block_size"] == [64, 64]
    for strategy in STRATEGIES:
        assert to_fp8(tmp_path / "a", tmp_path / strategy, strategy, "--ue8m0").exit_code == 0
        check_fp8(tmp_path / strategy, matrices(), strategy, ue8m0=True)
    assert read_config(tmp_path / "block")["quantization_config"]["scale_fmt"] == "ue8m0"


def test_multi_token_prediction_and_latent_attention_of_deepseek(tmp_path: Path) -> None:
    """Layer 1 of 1 predicts a second token. 576 rows are four blocks and a half."""
    layer = "model.layers.1"
    linear = {
        f"{layer}.self_attn.q_a_proj.weight": random_matrix(256, 128),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": random_matrix(576, 128),
        f"{layer}.mlp.shared_experts.up_proj.weight": random_matrix(128, 128),
        f"{layer}.mlp.experts.0.up_proj.weight": random_matrix(128, 128),
    }
    other = {
        f"{layer}.eh_proj.weight": random_matrix(128, 256),
        f"{layer}.shared_head.head.weight": random_matrix(128, 128),
        f"{layer}.embed_tokens.weight": random_matrix(128, 128),
        f"{layer}.mlp.gate.weight": random_matrix(128, 128),
        f"{layer}.enorm.weight": random_matrix(1, 128)[0],
    }
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    save_checkpoint(tmp_path / "a", [linear, other], config)
    assert to_fp8(tmp_path / "a", tmp_path / "b").exit_code == 0
    made = load_checkpoint(tmp_path / "b")
    assert made[f"{layer}.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 1)
    for name, x in linear.items():
        codes, scales = oracle_quantize(x, (128, 128))
        np.testing.assert_array_equal(codes_of(made.pop(name)), codes)
        np.testing.assert_array_equal(made.pop(f"{name}_scale_inv").numpy(), scales)
    assert made.keys() == other.keys() and all(torch.equal(made[name], x) for name, x in other.items())
    plain = ["lm_head", *sorted(f"{layer}.{name}" for name in ("eh_proj", "mlp.gate", "shared_head.head"))]
    assert read_config(tmp_path / "b")["quantization_config"]["modules_to_not_convert"] == plain


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_every_finite_bfloat16(tmp_path: Path, strategy: str, ue8m0: bool) -> None:
    """Subnormal and largest ones among them, and back; each in blocks of like size, and all of them mixed."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    # By a power of two as scale, the very largest would be rounded up to 2**128.
    largest = 1.9 * 2.0**127 if ue8m0 else torch.finfo(torch.bfloat16).max
    ordered = torch.where(bits.view(torch.bfloat16).abs() <= largest, bits.view(torch.bfloat16), 0.0).view(512, 128)
    mixed = ordered.view(-1)[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(3))].view(512, 128)
    tensors = {f"model.layers.0.mlp.{name}.weight": x for name, x in (("up_proj", ordered), ("gate_proj", mixed))}
    save_checkpoint(tmp_path / "a", [tensors], CONFIG)
    options = ("--ue8m0",) if ue8m0 else ()
    assert to_fp8(tmp_path / "a", tmp_path / "b", strategy, *options).exit_code == 0
    made, block = load_checkpoint(tmp_path / "b"), STRATEGIES[strategy]
    assert to_bf16(tmp_path / "b", tmp_path / "c").exit_code == 0
    back = load_checkpoint(tmp_path / "c")
    for name, x in tensors.items():
        codes, scales = oracle_quantize(x, block, ue8m0=ue8m0)
        np.testing.assert_array_equal(codes_of(made[name]), codes, name)
        np.testing.assert_array_equal(made[name + SUFFIX[strategy]].numpy().reshape(scales.shape), scales, name)
        expected = torch.from_numpy(oracle_dequantize(codes, scales, block)).to(torch.bfloat16)
        assert torch.equal(back[name], expected)
    assert run("verify", tmp_path / "a", tmp_path / "b").exit_code == 0
    assert run("verify", tmp_path / "b", tmp_path / "c").exit_code == 0


SOURCES = {
    "fp8 block": (R1_FP8, (128, 128)),
    "fp8 tensor": (TENSOR_FP8, (0, 0)),
    "channel": (GLM_FP8, (1, 0)),
    "tensor": (with_strategy("tensor"), (0, 0)),
    "block": (with_strategy("block", block_structure=[96, 64]), (96, 64)),
}


@pytest.mark.usefixtures("strip_bytes")
@pytest.mark.parametrize("source", SOURCES)
def test_fp8_of_every_kind_to_bf16_and_to_fp8(tmp_path: Path, source: str) -> None:
    quantization, block = SOURCES[source]
    fp8_checkpoint(tmp_path / "a", quantization, block)
    done = to_bf16(tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0 and "0 matrices quantised, 4 dequantised, 7 copied;" in done.output
    made = load_checkpoint(tmp_path / "b")
    for name, x in dequantised(block).items():
        assert torch.equal(made.pop(name), x.to(torch.bfloat16)), name
    check_plain(made)
    for strategy in STRATEGIES:
        assert to_fp8(tmp_path / "a", tmp_path / strategy, strategy).exit_code == 0
        check_fp8(tmp_path / strategy, dequantised(block), strategy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_fewer_bits_are_taken_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    name, x = next(iter(matrices().items()))
    pair = fp8_pair(name, x, (1, 0), "_scale")
    pair[f"{name}_scale"] = pair[f"{name}_scale"].to(dtype)
    save_checkpoint(tmp_path / "a", [pair], {**CONFIG, "quantization_config": GLM_FP8})
    assert to_bf16(tmp_path / "a", tmp_path / "b").exit_code == 0
    expected = oracle_dequantize(codes_of(pair[name]), pair[f"{name}_scale"].float().numpy(), (1, 0))
    assert torch.equal(load_checkpoint(tmp_path / "b")[name], torch.from_numpy(expected).to(torch.bfloat16))


def test_fp8_that_stays_out_becomes_bf16(tmp_path: Path) -> None:
    """A matrix that the table does not name is dequantised even where the rest is quantised, and named."""
    pair = fp8_pair("lm_head.weight", random_matrix(128, 128), (128, 128))
    pair |= fp8_pair("model.layers.0.mlp.down_proj.weight", random_matrix(128, 128), (128, 128))
    save_checkpoint(tmp_path / "a", [pair], {**CONFIG, "quantization_config": R1_FP8})
    assert to_fp8(tmp_path / "a", tmp_path / "b").exit_code == 0
    made = load_checkpoint(tmp_path / "b")
    assert made["lm_head.weight"].dtype == torch.bfloat16 and "lm_head.weight_scale_inv" not in made
    assert read_config(tmp_path / "b")["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_there_and_back_gives_the_same_fp8(tmp_path: Path, strategy: str) -> None:
    bf16_checkpoint(tmp_path / "a")
    assert to_fp8(tmp_path / "a", tmp_path / "b", strategy).exit_code == 0
    assert to_bf16(tmp_path / "b", tmp_path / "c").exit_code == 0
    assert to_fp8(tmp_path / "c", tmp_path / "d", strategy).exit_code == 0
    assert files_of(tmp_path / "b") == files_of(tmp_path / "d")


def test_configs(tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path / "a", R1_FP8, (128, 128))
    nested = {"model_type": "qwen3_moe", "dtype": "float8", "quantization_config": R1_FP8}
    config = {"quantization_config": R1_FP8, "compression_config": R1_FP8, "text_config": nested, "x": "ü"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert to_bf16(tmp_path / "a", tmp_path / "b").exit_code == 0
    text = {"model_type": "qwen3_moe", "dtype": "bfloat16"}
    assert read_config(tmp_path / "b") == {"text_config": text, "x": "ü"}
    assert to_fp8(tmp_path / "b", tmp_path / "c").exit_code == 0
    names = ["lm_head", "model.layers.1.mlp.gate"]
    quantization = {**R1_FP8, "modules_to_not_convert": names}
    assert read_config(tmp_path / "c") == {"text_config": text, "x": "ü", "quantization_config": quantization}
    (tmp_path / "a" / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": R1_FP8}))
    for strategy, field in (("channel", "ignore"), ("tensor", "modules_to_not_convert")):
        assert to_fp8(tmp_path / "a", tmp_path / strategy, strategy).exit_code == 0
        made = read_config(tmp_path / strategy)
        assert made.pop("quantization_config")[field] == names and made == CONFIG
    (tmp_path / "a" / "config.json").write_text(json.dumps({"quantization_config": R1_FP8}))
    assert to_bf16(tmp_path / "a", tmp_path / "d").exit_code == 0
    assert read_config(tmp_path / "d") == {"torch_dtype": "bfloat16"}


def test_everything_but_weights_comes_along_from_a_cache_of_links(tmp_path: Path) -> None:
    bf16_checkpoint(tmp_path / "blobs")
    names = ("tokenizer.json", "generation_config.json", "chat_template.jinja", "code/modeling.py", "LICENSE")
    for name in names:
        (tmp_path / "blobs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "blobs" / name).write_text(name)
        (tmp_path / "blobs" / name).chmod(0o444)
    (tmp_path / "blobs" / "pytorch_model.bin").write_bytes(b"old")
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "a" / path.name).symlink_to(path)
    assert to_fp8(tmp_path / "a", tmp_path / "b").exit_code == 0
    made = files_of(tmp_path / "b")
    assert {name: made[name].decode() for name in names} == {name: name for name in names}
    assert not [path for path in (tmp_path / "b").rglob("*") if path.is_symlink()]
    assert set(made) - set(names) == {"config.json", "model.safetensors.index.json"} | {
        file.name for file in (tmp_path / "a").glob("*.safetensors")
    }


def test_a_checkpoint_of_one_file_stays_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", [matrices()], CONFIG)
    assert to_fp8(tmp_path / "a", tmp_path / "b").exit_code == 0
    assert set(files_of(tmp_path / "b")) == {"config.json", "model.safetensors"}


# ---------------------------------------------------------------------------------------------------------- refusals


def test_targets_that_are_refused_stay_as_they_were(tmp_path: Path) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link", source / "b", tmp_path / "b", tmp_path / "b" / "mine"):
        refused(to_fp8(source, target), target)
    assert files_of(tmp_path / "b") == {"mine": b"mine"} and not (source / "b").exists()
    assert to_fp8(source, tmp_path / "c").exit_code == 0
    made = files_of(tmp_path / "c")
    done = to_fp8(source, tmp_path / "c")
    assert done.exit_code == 0 and "complete already" in done.output
    refused(to_fp8(source, tmp_path / "c", "channel"), "is not empty")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(to_fp8(source, tmp_path / "loop"), "link to itself")
    assert files_of(tmp_path / "c") == made


def test_bad_sources_and_options_leave_nothing(tmp_path: Path) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    refused(to_bf16(source, tmp_path / "b"), "config.json", "no quantization_config")
    refused(to_fp8(source, tmp_path / "b", "channel", "--block-size", 128, 128), "--block-size is for")
    refused(to_fp8(source, tmp_path / "b", "block", "--block-size", 0, 0), "from 1")
    refused(to_fp8(source, tmp_path / "b", "block", "--block-size", 64, 128), "two equal numbers")
    refused(to_fp8(tmp_path / "nowhere", tmp_path / "b"), "not a directory")
    file = next(source.glob("*00002-of-00002.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    refused(to_fp8(source, tmp_path / "b"), file, "truncated")
    assert not (tmp_path / "b").exists()


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(to_fp8(bf16_checkpoint(tmp_path / "a"), tmp_path / "b"), "GB are free")
    assert not (tmp_path / "b").exists()


def test_a_directory_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    descriptor = os.open(tmp_path / "b", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    refused(to_fp8(bf16_checkpoint(tmp_path / "a"), tmp_path / "b"), "another process")
    os.close(descriptor)
    assert to_fp8(tmp_path / "a", tmp_path / "b").exit_code == 0


@pytest.mark.usefixtures("strip_bytes")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, strategy: str) -> None:
    tensors = matrices()
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name][-1, -1] = value
    source = save_checkpoint(tmp_path / "a", [tensors], CONFIG)
    refused(to_fp8(source, tmp_path / "b", strategy), name, source / "model.safetensors", "not finite")
    assert not (tmp_path / "b" / "config.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])  # the last is too large for what is there
def test_scales_and_values_of_fp8_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    name, x = next(iter(matrices().items()))
    for broken in (name, f"{name}_scale_inv"):
        pair = fp8_pair(name, x, (128, 128))
        if broken == name:
            pair[name].view(torch.uint8)[-1, -1] = 0xFF
        else:
            pair[broken][1, 2] = value
        shards = [{name: pair[name]}, {f"{name}_scale_inv": pair[f"{name}_scale_inv"]}]
        source = save_checkpoint(tmp_path / "a", shards, {**CONFIG, "quantization_config": R1_FP8})
        named = name if value == 1e38 else broken
        file = source / f"model-0000{1 if named == name else 2}-of-00002.safetensors"
        for convert in (to_bf16, to_fp8):
            refused(convert(source, tmp_path / "b"), named, file, "not finite")
            shutil.rmtree(tmp_path / "b")

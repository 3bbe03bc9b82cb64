"""`flotilla verify` and `flotilla inspect` on small checkpoints. Nothing is faked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.weight_sync.checkpoints import strips
from services.weight_sync.checkpoints.compare import Comparison, Difference, compare
from services.weight_sync.checkpoints.summary import summarise
from services.weight_sync.checkpoints.weights import open_directory
from tests.checkpoints import (
    GLM_FP8,
    R1_FP8,
    Tensors,
    fp8_pair,
    oracle_dequantize,
    oracle_quantize,
    random_matrix,
    save_checkpoint,
    with_strategy,
)

NAME = "model.layers.0.mlp.up_proj.weight"
BLOCKS = {
    "block": (R1_FP8, (128, 128), "_scale_inv"),
    "small block": (with_strategy("block", block_structure=[96, 64]), (96, 64), "_scale"),
    "channel": (GLM_FP8, (1, 0), "_scale"),
    "tensor": (with_strategy("tensor"), (0, 0), "_scale"),
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def plain(directory: Path, tensors: Tensors) -> Path:
    return save_checkpoint(directory, [tensors], {"model_type": "llama"})


def fp8(directory: Path, x: torch.Tensor, kind: str) -> Path:
    quantization, block, suffix = BLOCKS[kind]
    config = {"model_type": "llama", "quantization_config": quantization}
    return save_checkpoint(directory, [fp8_pair(NAME, x, block, suffix)], config)


def compared(first: Path, second: Path) -> Comparison:
    return compare(open_directory(first), open_directory(second), 2, lambda count: None)


def only(comparison: Comparison) -> Difference:
    assert len(comparison.differences) == 1
    return comparison.differences[0]


def bounded(x: torch.Tensor, kind: str) -> tuple[float, float]:
    """Largest error by its bound, and by the largest element, an element at a time in Python's float64."""
    _, block, _ = BLOCKS[kind]
    codes, scales = oracle_quantize(x, block)
    y = oracle_dequantize(codes, scales, block).astype(float)
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    units, errors = 0.0, 0.0
    for (i, j), value in np.ndenumerate(x.float().numpy().astype(float)):
        error = abs(value - y[i, j])
        errors = max(errors, error)
        units = max(units, error / max(2**-4 * abs(value), 2**-10 * float(scales[i // rows, j // columns])))
    return units, errors / float(torch.maximum(x.float().abs(), torch.from_numpy(y)).max())


@pytest.mark.parametrize("strip_bytes", [strips.STRIP_BYTES, 1])
@pytest.mark.parametrize("kind", BLOCKS)
def test_fp8_against_its_source_is_measured_in_units_of_the_bound(
    tmp_path: Path, kind: str, strip_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strips, "STRIP_BYTES", strip_bytes)
    x = random_matrix(200, 130)
    x[:4] *= 2**-9  # subnormal codes
    found = only(compared(plain(tmp_path / "a", {NAME: x}), fp8(tmp_path / "b", x, kind)))
    units, relative = bounded(x, kind)
    assert found.equal and 0.8 < units < 1.001
    assert found.units == pytest.approx(units, rel=1e-5) and found.relative == pytest.approx(relative, rel=1e-5)
    assert only(compared(tmp_path / "b", tmp_path / "a")) == found


@pytest.mark.parametrize("kind", BLOCKS)
def test_one_element_too_far_is_found(tmp_path: Path, kind: str) -> None:
    x = random_matrix(300, 130)
    fp8(tmp_path / "b", x, kind)
    x[299, 129] += 0.2 * x[299].abs().max()
    found = only(compared(plain(tmp_path / "a", {NAME: x}), tmp_path / "b"))
    assert not found.equal and found.units is not None and found.units > 1.5


def test_fp8_of_two_kinds_may_stand_for_one_another(tmp_path: Path) -> None:
    x = random_matrix(200, 130)
    fp8(tmp_path / "a", x, "channel")
    codes, scales = oracle_quantize(x, (1, 0))
    fp8(tmp_path / "b", torch.from_numpy(oracle_dequantize(codes, scales, (1, 0))), "block")
    assert only(compared(tmp_path / "a", tmp_path / "b")).equal
    fp8(tmp_path / "b", x, "tensor")
    assert only(compared(tmp_path / "a", tmp_path / "b")).equal
    fp8(tmp_path / "c", x * 1.4, "block")
    assert not only(compared(tmp_path / "a", tmp_path / "c")).equal
    same = only(compared(tmp_path / "a", tmp_path / "a"))
    assert same.equal and same.units == 0 and same.relative == 0


def test_without_fp8_every_bit_counts(tmp_path: Path) -> None:
    tensors = {
        "a": random_matrix(3, 700_000),
        "b": torch.tensor([1.0, float("nan"), float("inf")]),
        "c": torch.tensor([0.0, 2.0]),
        "d": torch.arange(5),
        "e": torch.tensor(True),
        "f": torch.empty(0),
        "g": torch.ones(3, dtype=torch.bfloat16),
        "h": torch.tensor([2.0, 1.0], dtype=torch.float64),
    }
    plain(tmp_path / "a", tensors)
    assert compared(tmp_path / "a", tmp_path / "a").equal
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["a"][2, -1] *= 1.5
    changed["b"][0] = float("nan")
    changed["c"][0] = -0.0
    changed["d"][3] = 4
    changed["g"] = torch.ones(3)
    changed["h"][0] += 2**-50
    found = compared(plain(tmp_path / "b", changed), tmp_path / "a")
    wrong = {one.name: one.relative for one in found.differences if not one.equal}
    assert wrong.keys() == {"a", "b", "c", "d", "h"} and not found.equal
    assert wrong["b"] == float("inf") and wrong["c"] == 0 and wrong["d"] == 0.25 and 0 < wrong["h"] < 1e-15
    assert found.differences[0].name == "b"


def test_infinities_are_as_far_as_can_be_from_fp8(tmp_path: Path) -> None:
    x = random_matrix(8, 8)
    fp8(tmp_path / "a", x, "channel")
    for value in (float("inf"), float("-inf"), float("nan")):
        x[3, 3] = value
        found = only(compared(plain(tmp_path / "b", {NAME: x}), tmp_path / "a"))
        assert not found.equal and found.relative == found.units == float("inf")
    zeros = {NAME: torch.zeros(8, 8)}
    config = {"model_type": "llama", "quantization_config": GLM_FP8}
    pair = {NAME: torch.zeros(8, 8).to(torch.float8_e4m3fn), f"{NAME}_scale": torch.zeros(8, 1)}
    save_checkpoint(tmp_path / "a", [pair], config)
    assert only(compared(plain(tmp_path / "b", zeros), tmp_path / "a")).units == 0
    zeros[NAME][0, 1] = 1e-9
    assert not only(compared(plain(tmp_path / "b", zeros), tmp_path / "a")).equal


def test_names_and_shapes_that_differ_are_told(tmp_path: Path) -> None:
    plain(tmp_path / "a", {"a": torch.ones(2), "b": torch.ones(2, 3), "c": torch.ones(1)})
    plain(tmp_path / "b", {"a": torch.ones(2), "b": torch.ones(3, 2), "d": torch.ones(1)})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert (found.only_first, found.only_second, found.shapes) == (("c",), ("d",), (("b", (2, 3), (3, 2)),))
    assert not found.equal
    done = run("verify", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 1
    for words in (f"only in {tmp_path / 'a'}: c", f"only in {tmp_path / 'b'}: d", "b is [2, 3]", "NOT equal"):
        assert words in done.output


def test_verify_shows_the_worst_first(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(5)]
    plain(tmp_path / "a", {name: torch.ones(4) for name in names})
    plain(tmp_path / "b", {name: torch.ones(4) + number / 10 for number, name in enumerate(names)})
    done = run("verify", tmp_path / "a", tmp_path / "b", "--worst", 2)
    assert done.exit_code == 1 and "5 tensors compared: 4 differ, 4 by more than they may; NOT equal" in done.output
    assert done.output.index("t4") < done.output.index("t3") and "t2" not in done.output
    done = run("verify", tmp_path / "a", tmp_path / "a")
    assert done.exit_code == 0 and "5 tensors compared: 0 differ" in done.output
    fp8(tmp_path / "c", random_matrix(8, 8), "channel")
    plain(tmp_path / "d", {NAME: random_matrix(8, 8)})
    done = run("verify", tmp_path / "c", tmp_path / "d")
    assert done.exit_code == 0 and "1 differ, 0 by more" in done.output and NAME in done.output
    assert run("verify", tmp_path / "a", tmp_path / "nowhere").exit_code == 2


def moe(directory: Path) -> Path:
    """Two layers of two experts and one for multi-token prediction."""
    tensors: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.ones(10, 4), "model.other": torch.ones(3)}
    for layer in (9, 10, 11):
        for expert in (0, 1):
            name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
            tensors |= fp8_pair(name, random_matrix(4, 8), (128, 128))
        tensors |= {
            f"model.layers.{layer}.mlp.gate.weight": torch.ones(2, 4),
            f"model.layers.{layer}.self_attn.q_norm.weight": torch.ones(4),
            f"model.layers.{layer}.self_attn.o_proj.weight": torch.ones(4, 4, dtype=torch.bfloat16),
        }
    tensors["model.layers.11.eh_proj.weight"] = torch.ones(4, 8, dtype=torch.bfloat16)
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 11, "quantization_config": R1_FP8}
    return save_checkpoint(directory, [tensors], config)


def test_inspect_folds_layers_and_experts(tmp_path: Path) -> None:
    summary = summarise(open_directory(moe(tmp_path)))
    assert (summary.model_type, summary.quantisation, summary.files) == ("deepseek_v3", "fp8 block 128x128", 1)
    rows = {row.name: row for row in summary.rows}
    experts = rows["model.layers.*.mlp.experts.*.up_proj.weight"]
    assert (experts.count, experts.shape, experts.dtype) == (4, (4, 8), "F8_E4M3")
    assert (experts.quantisation, experts.size_bytes) == ("fp8 block 128x128", 128)
    assert rows["model.layers.11.mlp.experts.*.up_proj.weight"].count == 2
    assert rows["model.layers.*.self_attn.o_proj.weight"].quantisation == ""
    parts = {part.name: (part.tensors, part.parameters, part.size_bytes) for part in summary.parts}
    assert parts == {
        "attention": (2, 32, 64),
        "experts": (4, 128, 128),
        "routers": (2, 16, 64),
        "embeddings": (1, 40, 160),
        "norms": (2, 8, 32),
        "mtp": (6, 64 + 8 + 4 + 16 + 32, 64 + 32 + 16 + 32 + 64),
        "scales": (6, 0, 24),
        "other": (1, 3, 12),
    }
    total = summary.total
    assert total.size_bytes == sum(size for _, _, size in parts.values()) == sum(one.size_bytes for one in summary.rows)


def test_names_are_neither_cut_nor_taken_for_markup(tmp_path: Path) -> None:
    name = "model.layers.²[/b][bold]." + "long." * 60 + "weight"
    save_checkpoint(tmp_path, [{name: torch.ones(1)}], {"model_type": "[/b]"})
    shown = "".join(
        part.strip() for line in run("inspect", tmp_path).output.splitlines() for part in line.split("│")[1:2]
    )
    assert name in shown


def test_inspect_prints_a_table_or_json(tmp_path: Path) -> None:
    done = run("inspect", moe(tmp_path))
    assert done.exit_code == 0
    for words in ("deepseek_v3, files: 1, quantisation: fp8 block 128x128", "layers.*.mlp.experts.*.up_proj", "4 x 8"):
        assert words in done.output
    content = json.loads(run("inspect", tmp_path, "--json").output)
    assert content["total"]["tensors"] == len(open_directory(tmp_path).checkpoint.tensors)
    assert {"name", "count", "shape", "dtype", "quantisation", "size_bytes"} == content["rows"][0].keys()
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = run("inspect", tmp_path)
    assert done.exit_code == 2 and "model.safetensors is truncated" in done.output

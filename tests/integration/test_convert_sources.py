"""Sources that change meanwhile or cannot be read, disks that are full, blocks of odd sizes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.cli import progress
from services.weight_sync.checkpoints import writing
from services.weight_sync.checkpoints.convert import convert
from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.plan import plan_fp8
from services.weight_sync.checkpoints.weights import open_directory
from services.weight_sync.layout import BLOCK_128
from tests.checkpoints import (
    files_of,
    fp8_pair,
    load_checkpoint,
    oracle_dequantize,
    oracle_quantize,
    random_matrix,
    save_checkpoint,
)
from tests.conversions import bf16_checkpoint, refused, run, to_bf16, to_fp8

MATRIX = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("changed", ["the second file", "config.json", "tokenizer.json"])
def test_a_source_that_changes_meanwhile_is_noticed_before_the_config_is_written(tmp_path: Path, changed: str) -> None:
    """The same bytes in a new file are another file."""
    source = bf16_checkpoint(tmp_path / "a")
    (source / "tokenizer.json").write_text("{}")
    file = max(source.glob("*.safetensors")) if changed == "the second file" else source / changed
    plan = plan_fp8(open_directory(source), BLOCK_128)

    def replace_once(_count: int) -> None:
        if not (source / "new").exists():
            (source / "new").write_bytes(file.read_bytes())
            os.replace(source / "new", file)
            (source / "new").mkdir()

    with pytest.raises(CheckpointError, match="has changed since") as caught:
        convert(plan, tmp_path / "b", 1, replace_once)
    assert str(file) in str(caught.value) and not (tmp_path / "b" / "config.json").exists()


def test_a_continued_conversion_has_no_files_of_an_older_source(tmp_path: Path, monkeypatch: Any) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    (source / "old.json").write_text("old")
    monkeypatch.setattr(writing, "write_exactly", fail_with(errno.ENOSPC))
    refused(to_fp8(source, tmp_path / "b"))
    monkeypatch.undo()
    (source / "old.json").unlink()
    refused(to_fp8(source, tmp_path / "b"), "has changed since")


def fail_with(number: int) -> Any:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_is_told_with_the_file_and_can_be_continued(tmp_path: Path, monkeypatch: Any) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    monkeypatch.setattr(writing, "write_exactly", fail_with(errno.ENOSPC))
    refused(
        to_fp8(source, tmp_path / "b"), tmp_path / "b" / "model-0000", "No space left", "the same command continues"
    )
    monkeypatch.undo()
    assert to_fp8(source, tmp_path / "b").exit_code == 0
    assert to_fp8(source, tmp_path / "whole").exit_code == 0
    assert files_of(tmp_path / "b") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model-00001-of-00002.safetensors"])
def test_what_is_no_file_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    refused(to_fp8(source, tmp_path / "b"), source / name, "file")
    assert not (tmp_path / "b").exists()


def test_files_of_weights_that_are_not_copied_are_named(tmp_path: Path) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    (source / "original").mkdir()
    (source / "original" / "consolidated.pth").write_bytes(b"x")
    (source / "training_args.bin").write_bytes(b"x")
    done = to_fp8(source, tmp_path / "b")
    assert done.exit_code == 0 and "not copied: original/consolidated.pth, training_args.bin" in done.output


def test_an_unfinished_conversion_is_no_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writing, "write_exactly", fail_with(errno.ENOSPC))
    refused(to_fp8(bf16_checkpoint(tmp_path / "a"), tmp_path / "b"))
    monkeypatch.undo()
    for command in (("inspect", tmp_path / "b"), ("verify", tmp_path / "a", tmp_path / "b")):
        refused(run(*command), "unfinished conversion")


@pytest.mark.parametrize("blocks", [(96, 128), (125, 64), (1 << 16, 128)], ids=str)
def test_blocks_that_no_strip_is_whole_of(tmp_path: Path, blocks: tuple[int, int], monkeypatch: Any) -> None:
    """A common multiple of both heights would be too many rows to hold."""
    monkeypatch.setattr("services.weight_sync.checkpoints.strips.STRIP_BYTES", 1 << 12)
    monkeypatch.setattr("services.weight_sync.checkpoints.strips.LARGEST_STRIP_BYTES", 1 << 15)
    x, block = random_matrix(1000, 256), (min(blocks[0], 1000), blocks[1])
    quantization = {"quant_method": "fp8", "weight_block_size": list(blocks)}
    config = {"model_type": "llama", "quantization_config": quantization}
    source = save_checkpoint(tmp_path / "a", [fp8_pair(MATRIX, x, block, "_scale_inv")], config)
    assert to_bf16(source, tmp_path / "bf16").exit_code == 0
    expected = torch.from_numpy(oracle_dequantize(*oracle_quantize(x, block), block)).to(torch.bfloat16)
    assert torch.equal(load_checkpoint(tmp_path / "bf16")[MATRIX], expected)
    assert to_fp8(source, tmp_path / "b").exit_code == 0
    assert run("verify", source, tmp_path / "b").exit_code == 0


def test_verify_in_json(tmp_path: Path) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    assert to_fp8(source, tmp_path / "b").exit_code == 0
    done = run("verify", source, tmp_path / "b", "--json")
    found = json.loads(done.output)
    assert done.exit_code == 0 and found["equal"] and len(found["differences"]) == 11
    assert 0 < found["differences"][0]["units"] <= 1


def test_without_a_terminal_there_is_a_line_a_minute(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.byte_progress("converting", 4_000_000, 1_000_000) as advance:
        advance(1_500_000)
    assert capsys.readouterr().err == "converting: 2.5 MB of 4.0 MB\n"

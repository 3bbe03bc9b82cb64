"""Models to torch_dist and back, by one process and by several on gloo: every bit comes back, in any layout.

Nothing is faked. A conversion that is killed is a real process that is ended by SIGKILL while it writes.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import FlotillaError
from services.common.lock import hold
from services.common.service import EXIT_BAD_INPUT
from services.common.spec import ParallelSpec
from services.trainer import megatron, torch_dist
from services.trainer.checkpoint import RunState, save
from services.trainer.hf_files import find_tensors
from services.trainer.megatron import ONE_RANK
from services.trainer.model_config import read_config
from services.trainer.step import Learner
from services.trainer.torch_dist import split_pipeline, write_hf, write_torch_dist
from tests.tiny_models import save_model, save_mtp_model
from tests.trainer_cases import make_spec
from tests.trainer_conversions import BACK
from tests.trainer_ranks import ROOT, run_ranks

pytestmark = pytest.mark.stack

PLAIN = ("qwen3", "llama", "qwen2", "qwen3_moe")
WITH_MTP = ("deepseek_v3", "glm4_moe")
"""Families whose checkpoints have a layer for multi-token prediction."""


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    megatron.initialize(seed=1)
    yield
    megatron.destroy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family; qwen3 is tied."""
    path = tmp_path_factory.mktemp("models")
    for family in PLAIN:
        save_model(path / family, family, tied=family == "qwen3")
    for family in WITH_MTP:
        save_mtp_model(path / family, family)
    return path


def compare(model: Path, back: Path) -> None:
    """Every tensor by name, dtype and bits, index and other files."""
    expected, files = load_file(model / "model.safetensors"), find_tensors(back)
    assert files.keys() == expected.keys()
    found = {name: tensor for file in set(files.values()) for name, tensor in load_file(file).items()}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    total = json.loads((back / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in expected.values())
    for name in ("config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize("family", [*PLAIN, *WITH_MTP])
def test_one_process_brings_every_bit_back(
    family: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 300_000)
    write_torch_dist(models / family, tmp_path / "torch_dist", ONE_RANK)
    write_hf(tmp_path / "torch_dist", models / family, tmp_path / "hf")
    compare(models / family, tmp_path / "hf")
    sizes = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    assert len(sizes) > 2
    assert {path.name for path in tmp_path.iterdir()} == {"torch_dist", "hf"}


def test_two_processes_do_the_same_in_any_layout(models: Path, tmp_path: Path) -> None:
    layouts = {
        "qwen3": {"tensor": 2},
        "deepseek_v3": {"expert": 2},
        "glm4_moe": {"pipeline": 2, "last_stage_layers": 1},
    }
    cases = [(str(models / family), str(tmp_path / family), sizes) for family, sizes in layouts.items()]
    run_ranks("trainer_conversions", 2, cases, tmp_path)
    for family in layouts:
        compare(models / family, tmp_path / (family + BACK))
        write_hf(tmp_path / family, models / family, tmp_path / f"{family}-by-one")
        compare(models / family, tmp_path / f"{family}-by-one")


def test_torchrun_splits_the_layers_over_its_processes(models: Path, tmp_path: Path) -> None:
    model = models / "deepseek_v3"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "services.trainer.convert"]
    options = ["hf-to-torch-dist", "--hf", str(model), "--output", str(tmp_path / "torch_dist")]
    done = subprocess.run([sys.executable, *command, *options], cwd=ROOT, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{tmp_path / 'torch_dist'} is complete"
    assert len(list((tmp_path / "torch_dist").glob("*.distcp"))) == 2
    write_hf(tmp_path / "torch_dist", model, tmp_path / "hf")
    compare(model, tmp_path / "hf")


@pytest.mark.parametrize(
    ("layers", "ranks", "stages", "last"),
    [(61, 1, 1, 0), (61, 16, 16, 1), (61, 32, 16, 1), (92, 8, 8, 8), (3, 2, 2, 1), (5, 4, 2, 2), (4, 4, 4, 1)],
)
def test_the_last_stage_gets_what_is_left(layers: int, ranks: int, stages: int, last: int) -> None:
    assert split_pipeline(layers, ranks) == ParallelSpec(pipeline=stages, last_stage_layers=last)


@pytest.mark.parametrize(("layers", "ranks"), [(3, 4), (7, 5)])
def test_layers_that_cannot_be_split_are_refused(layers: int, ranks: int) -> None:
    with pytest.raises(FlotillaError, match=f"{ranks} ranks"):
        split_pipeline(layers, ranks)


def test_a_run_starts_from_torch_dist(models: Path, tmp_path: Path) -> None:
    write_torch_dist(models / "qwen3", tmp_path / "torch_dist", ONE_RANK)
    spec, model = make_spec(models / "qwen3"), read_config(models / "qwen3")
    source = spec.model.model_copy(update={"load": tmp_path / "torch_dist"})
    learner = Learner(spec.model_copy(update={"model": source}), model)
    learner.load_initial_weights()
    expected = Learner(spec, model)
    expected.load_initial_weights()
    for ours, theirs in zip(learner.chunks[0].parameters(), expected.chunks[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for (_, _, ours), (_, _, theirs) in zip(learner.optimizer.shards(), expected.optimizer.shards(), strict=True):
        assert torch.equal(ours["param"], theirs["param"])


def flotilla(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.loading", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)


def test_a_run_is_exported(models: Path, tmp_path: Path) -> None:
    spec = make_spec(models / "glm4_moe", tmp_path / "run")
    learner = Learner(spec, read_config(models / "glm4_moe"))
    learner.load_initial_weights()
    for step in (1, 2):
        save(tmp_path / "run" / "checkpoints", learner, RunState(step, "digest", ("batch",) * step))
        torch.nn.init.zeros_(next(learner.chunks[0].parameters()))  # so that only the first has the model's weights
    (tmp_path / "run" / "run.toml").write_text(spec.to_toml())
    done = flotilla("export", tmp_path / "run" / "checkpoints" / "step-00000001", "--output", tmp_path / "first")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'first'} is complete\n"), done.stderr
    compare(models / "glm4_moe", tmp_path / "first")
    done = flotilla("export", tmp_path / "run", "--output", tmp_path / "newest")
    assert done.returncode == 0, done.stderr
    with pytest.raises(AssertionError, match="embed_tokens"):
        compare(models / "glm4_moe", tmp_path / "newest")


def test_what_cannot_be_used_is_one_line(models: Path, tmp_path: Path) -> None:
    convert = ("convert", "hf-to-torch-dist", "--hf", models / "qwen3", "--output", tmp_path / "torch_dist")
    for arguments, why in (
        ((*convert, "--tensor", 2), "parallel: tensor x context x pipeline = 2 does not divide the number of ranks, 1"),
        (("export", tmp_path, "--output", tmp_path / "hf"), f"{tmp_path} belongs to no run"),
    ):
        done = flotilla(*arguments)
        assert done.returncode == EXIT_BAD_INPUT
        assert why in done.stderr and done.stderr.count("\n") == 1


def other_config(model: Path, folder: Path, **fields: int) -> Path:
    """The same checkpoint with another config.json."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"intermediate_size": 384}, r"decoder\.layers\.0\.mlp\.linear_fc1\.weight is \[512, 128\].*\[768, 128\]"),
        ({"vocab_size": 640}, r"embedding\.word_embeddings\.weight is \[320, 128\].*\[640, 128\]"),
        ({"num_hidden_layers": 3}, r"decoder\.layers\.2\.\S+ of the model is missing"),
        ({"num_hidden_layers": 1}, r"tensors are unknown to the model, as decoder\.layers\.1\."),
        ({"tie_word_embeddings": 0}, r"output_layer\.weight of the model is missing"),
    ],
)
def test_another_model_is_refused_by_tensor(models: Path, tmp_path: Path, fields: dict[str, int], why: str) -> None:
    write_torch_dist(models / "qwen3", tmp_path / "torch_dist", ONE_RANK)
    other = other_config(models / "qwen3", tmp_path / "other", **fields)
    with pytest.raises(FlotillaError, match=f"{tmp_path / 'torch_dist'}: .*{why}"):
        write_hf(tmp_path / "torch_dist", other, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def quantised(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))


def of_two_dtypes(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, model / "model.safetensors")


def truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def incomplete(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, model / "model.safetensors")

    return spoil


KEYS = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (changed(KEYS, lambda x: x[1:]), rf"{KEYS} is \[63, 128\], but config\.json says \[64, 128\]"),
        (changed(KEYS, lambda x: x[:, 1:]), rf"{KEYS} is \[64, 127\]"),
        (changed(KEYS, lambda x: x.flatten()), rf"{KEYS} is \[8192\]"),
        (changed(KEYS, lambda x: x.sum()), rf"{KEYS} is \[\]"),
        (quantised, "config.json: quantised"),
        (of_two_dtypes, "model.norm.weight is BF16"),
        (truncated, "model.safetensors: "),
        (incomplete, r"1 tensors are missing, the first is model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_checkpoint_that_would_change_is_refused(spoil: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(FlotillaError, match=why):
        write_torch_dist(tmp_path / "model", tmp_path / "torch_dist", ONE_RANK)
    assert not (tmp_path / "torch_dist").exists()


def test_a_directory_that_is_there_is_left_alone(models: Path, tmp_path: Path) -> None:
    with pytest.raises(FlotillaError, match="is there already"):
        write_torch_dist(models / "qwen3", tmp_path, ONE_RANK)
    with pytest.raises(FlotillaError, match="is there already"):
        write_hf(tmp_path, models / "qwen3", tmp_path)


def test_two_at_once_do_not_make_one_directory(models: Path, tmp_path: Path) -> None:
    with hold(tmp_path / ".made.lock", ""), pytest.raises(FlotillaError, match=f"{tmp_path / 'made'} is in use by"):
        write_torch_dist(models / "qwen3", tmp_path / "made", ONE_RANK)
    assert not (tmp_path / "made").exists()
    write_torch_dist(models / "qwen3", tmp_path / "made", ONE_RANK)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_full_disk_is_one_line(models: Path, tmp_path: Path) -> None:
    made = tmp_path / "torch_dist"
    write_torch_dist(models / "qwen3", made, ONE_RANK)
    calls = {
        "again": lambda: write_torch_dist(models / "qwen3", tmp_path / "again", ONE_RANK),
        "hf": lambda: write_hf(made, models / "qwen3", tmp_path / "hf"),
    }
    for name, call in calls.items():
        with files_of_at_most(1 << 16), pytest.raises(FlotillaError, match="not written") as refused:
            call()
        assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
        assert not (tmp_path / name).exists()
        call()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing more fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_damage_is_found(models: Path, tmp_path: Path) -> None:
    write_torch_dist(models / "qwen3", tmp_path / "torch_dist", ONE_RANK)
    file = tmp_path / "torch_dist" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(FlotillaError, match=r"damaged or missing: __0_0\.distcp"):
        write_hf(tmp_path / "torch_dist", models / "qwen3", tmp_path / "hf")


@pytest.mark.parametrize(
    "instant", ["saving._write", "saving._publish", "torch_dist._write_files", "torch_dist.publish_hf"]
)
def test_killed_it_leaves_nothing_of_the_final_name(models: Path, tmp_path: Path, instant: str) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from services.trainer import megatron, saving, torch_dist
        megatron.initialize(seed=1)
        model, made = Path({str(models / "qwen3")!r}), Path({str(tmp_path / "torch_dist")!r})
        if {instant!r}.startswith("torch_dist"):
            torch_dist.write_torch_dist(model, made, megatron.ONE_RANK)
        {instant} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        torch_dist.write_torch_dist(model, made, megatron.ONE_RANK) if not made.exists() else None
        torch_dist.write_hf(made, model, Path({str(tmp_path / "hf")!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    made, output = (tmp_path / name for name in ("torch_dist", "hf"))
    assert made.exists() == instant.startswith("torch_dist") and not output.exists()
    if not made.exists():
        write_torch_dist(models / "qwen3", made, ONE_RANK)
    write_hf(made, models / "qwen3", output)
    compare(models / "qwen3", output)
    assert {path.name for path in tmp_path.iterdir()} == {"torch_dist", "hf"}

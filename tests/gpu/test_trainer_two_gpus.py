"""The trainer in layouts over two GPUs on NCCL, in float32, against one GPU and Hugging Face. Needs two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_model
from tests.trainer_layouts import LOGITS, sequence
from tests.trainer_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {}),
    ("qwen3", {"overlap": True}),
    ("qwen3", {"tensor": 2, "recompute": "full"}),
    ("qwen3", {"pipeline": 2}),
    ("qwen3_deep", {"pipeline": 2, "virtual_stages": 2}),
    ("qwen3", {"context": 2}),
    ("deepseek_v3", {"context": 2, "recompute": "selective"}),
    ("deepseek_v3", {"tensor": 2, "expert": 2}),
    ("deepseek_v3", {"pipeline": 2, "last_stage_layers": 1}),
    ("glm4_moe", {"expert": 2, "overlap": True}),
    ("glm4_moe", {"tensor": 2, "expert_tensor": 2}),
)


def test_layouts(tmp_path: Path) -> None:
    names = {name for name, _ in CASES}
    for name in names:
        (tmp_path / name).mkdir()
        more = {"num_hidden_layers": 4} if name == "qwen3_deep" else {}
        hf = save_model(tmp_path / name, name.removesuffix("_deep"), seed=3, tied=name == "qwen3", **more)
        with torch.no_grad():
            torch.save(hf(sequence()).logits, tmp_path / name / LOGITS)
    run_ranks("trainer_layouts", 1, [(str(tmp_path / name), {}) for name in sorted(names)], tmp_path)
    run_ranks("trainer_layouts", 2, [(str(tmp_path / name), layout) for name, layout in CASES], tmp_path)

"""A data file and a spec for tests of supervised fine-tuning."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tomli_w

from services.common.spec.sft import SftSpec, load_sft
from services.trainer.sft.data import SftData, load_data
from tests.tiny_models import VOCABULARY


def write_rows(path: Path, count: int) -> Path:
    """Conversations of one or two questions, of different lengths, and a pair of texts now and then."""
    draw = random.Random(count)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(str(draw.randrange(1000)) for _ in range(draw.randint(1, 9)))}

    rows: list[dict[str, Any]] = []
    for _ in range(count):
        if draw.random() < 0.25:
            rows.append({"prompt": turn("user")["content"], "response": turn("assistant")["content"]})
        else:
            rows.append({"messages": [turn(role) for role in ("user", "assistant") * draw.randint(1, 2)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_spec(folder: Path, model: Path, rows: int = 18, **sections: dict[str, Any]) -> Path:
    """A spec beside its data, with every field at its default but for what is given."""
    table: dict[str, Any] = {
        "run_id": "tuned",
        "model": {"hf_checkpoint": str(model)},
        "data": {"path": str(write_rows(folder / "rows.jsonl", rows))},
        "sft": {"batch_size": 5, "epochs": 2},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2, "lr_decay": "cosine", "min_lr": 1e-4},
        "trainer": {"dtype": "float32", "max_tokens_per_micro_batch": 128, "num_threads": 1, "save_interval": 2},
    }
    for name, section in sections.items():
        table[name] = {**table.get(name, {}), **section}
    path = folder / "sft.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def make_case(folder: Path, model: Path, rows: int = 18, **sections: dict[str, Any]) -> tuple[SftSpec, SftData]:
    """A spec and its data."""
    spec = load_sft(write_spec(folder, model, rows, **sections), environ={})
    return spec, load_data(spec.data, model, VOCABULARY)

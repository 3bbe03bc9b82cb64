"""A run with a tiny model or without one: a run spec, a tokenizer and prompts, on ports of its own."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.spec import RunSpec
from tests.conftest import free_ports
from tests.tiny_models import save_model, save_tokenizer

GROUPS, SAMPLES = 4, 4
RESPONSE_TOKENS = 256
SAVE_INTERVAL, EVALUATION_INTERVAL = 3, 5
TRAIN_PROMPTS, HELD_OUT_PROMPTS = 40, 2


@dataclass(frozen=True, slots=True)
class Case:
    """A run on ports of its own."""

    folder: Path
    spec: RunSpec
    family: str
    """Of the model; empty if there is none."""

    @property
    def run_file(self) -> Path:
        """The run spec."""
        return self.folder / "run.toml"

    @property
    def kill_points(self) -> Path:
        """A file of the name of a kill point in here kills whoever comes by, once."""
        return self.folder / "kill_points"

    @property
    def trained_file(self) -> Path:
        """Where the trainer notes every optimizer step, those that a kill took back too."""
        return self.spec.run_dir / "trained.jsonl"


def make_case(folder: Path, num_rollout: int, *, family: str = "", **rollout: Any) -> Case:
    """Write everything; `rollout` changes that section of the spec."""
    (folder / "kill_points").mkdir(parents=True)
    (folder / "run" / "redis").mkdir(parents=True)
    if family:
        save_model(folder / "model", family)
    else:
        save_tokenizer(folder / "model")
        (folder / "model" / "config.json").write_text("{}")
    for name, count in (("train", TRAIN_PROMPTS), ("held_out", HELD_OUT_PROMPTS)):
        rows = [{"prompt": f"Say {number}", "label": str(number)} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = Case(folder, RunSpec.model_validate(_spec(folder, num_rollout, rollout)), family)
    case.run_file.write_text(case.spec.to_toml())
    return case


def _spec(folder: Path, num_rollout: int, rollout: dict[str, Any]) -> dict[str, Any]:
    sampling = {"rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES, "max_response_tokens": RESPONSE_TOKENS}
    ports = iter(free_ports(15))
    services: dict[str, Any] = {
        name: _endpoint(ports) for name in ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync")
    }
    return {
        "run_id": f"chaos-{uuid.uuid4().hex[:8]}",
        "run_dir": folder / "run",
        "model": {"hf_checkpoint": folder / "model"},
        "data": {"prompt_data": folder / "train.jsonl", "max_prompt_tokens": 64},
        "rollout": {"num_rollout": num_rollout, "lease_ttl_s": 1.0} | sampling | rollout,
        "algorithm": {"num_steps_per_rollout": 2},
        "optimizer": {"lr": 1e-3},
        "trainer": {
            "dtype": "float32",
            "num_threads": 1,
            "max_tokens_per_micro_batch": 1024,
            "save_interval": SAVE_INTERVAL,
        },
        "reward": {"require_think": False},
        "evaluation": {
            "interval": EVALUATION_INTERVAL,
            "max_response_tokens": RESPONSE_TOKENS,
            "sets": {"held-out": {"prompt_data": folder / "held_out.jsonl"}},
        },
        "services": services | {name: [_endpoint(ports)] for name in ("weight_agents", "engines")},
        "redis": {"port": next(ports), "maxmemory_mb": 128},
    }


def _endpoint(ports: Iterator[int]) -> dict[str, int]:
    return {"grpc_port": next(ports), "http_port": next(ports)}

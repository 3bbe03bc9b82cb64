"""Run specs, samples and batches for tests of the trainer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.spec import RunSpec
from services.trainer.batch import Batch, MicroBatch, Row, Sample, Samples
from services.trainer.report import Metrics, train_metrics
from services.trainer.step import Learner
from tests.tiny_models import VOCABULARY


def make_spec(model: Path, /, run_dir: Path = Path("run"), ranks: int = 1, **sections: dict[str, Any]) -> RunSpec:
    """A run spec with every section at its default but for what is given."""
    table: dict[str, Any] = {
        "run_id": "test",
        "run_dir": run_dir,
        "model": {"hf_checkpoint": model},
        "data": {"prompt_data": "prompts.jsonl", "max_prompt_tokens": 64},
        "rollout": {"num_rollout": 4, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "max_response_tokens": 64},
        "trainer": {"dtype": "float32"},
        "services": endpoints(ranks),
    }
    for name, section in sections.items():
        table[name] = {**table.get(name, {}), **section}
    return RunSpec.model_validate(table)


def endpoints(ranks: int) -> dict[str, Any]:
    """Of trainers and agents; the ports are not used."""
    trainers = [{"grpc_port": 8000 + rank, "http_port": 8100 + rank} for rank in range(ranks)]
    agents = [{"grpc_port": 8200 + rank, "http_port": 8300 + rank} for rank in range(ranks)]
    return {"trainer": trainers[0], "trainer_ranks": trainers[1:], "weight_agents": agents}


def train(learner: Learner, batch: Batch, samples: Samples) -> Metrics:
    """Train one process alone on a batch."""
    return train_metrics([learner.train(batch, samples)])


def make_samples(count: int, seed: int, longest: int = 24) -> list[Sample]:
    """Random samples of different lengths, some tokens masked."""
    draw = random.Random(seed)

    def tokens(low: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(low, longest)))

    samples = []
    for _ in range(count):
        prompt, response = tokens(2), tokens(1)
        log_probs = tuple(draw.uniform(-7.0, -3.0) for _ in response)
        mask = tuple(int(draw.random() < 0.8) for _ in response)
        samples.append(Sample(prompt, response, log_probs, mask))
    return samples


def make_batch(samples: Sequence[Sample], number: int, micro_batches: Sequence[Sequence[int]], steps: int = 1) -> Batch:
    """A batch whose samples are a rollout each; the micro-batches are dealt to the optimizer steps in order."""
    draw = random.Random(number)
    rows = tuple(Row(draw.gauss(0.0, 1.0), max(1, sum(one.loss_mask))) for one in samples)
    per_step = len(micro_batches) // steps
    dealt = tuple(MicroBatch(index // per_step, tuple(rows)) for index, rows in enumerate(micro_batches))
    rollouts = tuple(sum(len(one.rows) for one in dealt if one.optimizer_step == step) for step in range(steps))
    return Batch(number, f"digest-{number}", rows, rollouts, dealt)

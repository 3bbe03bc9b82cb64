"""Training speed on the CPU against Hugging Face transformers with torch's AdamW: one process, float32, tokens/s.

    python -m benchmarks.trainer [--rounds 5] [--threads 2]

A Qwen3-shaped model of 8 million parameters learns random tokens: first samples of 512 tokens each, then lengths with a
long tail (log-normal, median 200, 32 to 2,048), which the trainer packs, and which are padded for Hugging Face to the
longest of four. Both take the same samples in the same order, by turns; a round is one optimizer step of each.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.records import table
from services.common.schedule import Layout, make_schedule
from services.common.spec.sft import SftSpec
from services.trainer import megatron
from services.trainer.batch import Batch, MicroBatch, Row, Sample
from services.trainer.model_config import read_config
from services.trainer.step import Learner
from tests.tiny_models import save_model

VOCABULARY = 4096
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
"""8.1 million parameters."""
PADDED_TOGETHER = 4
"""Samples in one forward pass of Hugging Face."""
MICRO_BATCH_TOKENS = 4096
LEARNING_RATE, CLIP = 1e-4, 1.0


def draw(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def long_tail(count: int) -> list[int]:
    """Lengths in tokens."""
    generator = random.Random(1)
    return [min(2048, max(32, round(generator.lognormvariate(math.log(200), 1.0)))) for _ in range(count)]


class Ours:
    """Flotilla's trainer, as supervised fine-tuning uses it."""

    def __init__(self, model: Path) -> None:
        megatron.initialize(seed=1)
        table = {
            "run_id": "benchmark",
            "model": {"hf_checkpoint": str(model)},
            "data": {"path": "none"},
            "sft": {"batch_size": 1},
            "trainer": {"dtype": "float32", "max_tokens_per_micro_batch": MICRO_BATCH_TOKENS},
            "optimizer": {"lr": LEARNING_RATE, "clip_grad": CLIP},
        }
        self._learner = Learner(SftSpec.model_validate(table), read_config(model))
        self._learner.load_initial_weights()
        self._number = 0

    def step(self, tokens: Sequence[Sequence[int]]) -> None:
        """One optimizer step; every token but the first of a sample is learned."""
        samples = [Sample((one[0],), tuple(one[1:]), (0.0,) * (len(one) - 1), (1,) * (len(one) - 1)) for one in tokens]
        total = sum(len(one.response) for one in samples)
        plan = make_schedule([len(one) for one in tokens], [0] * len(tokens), Layout(1, MICRO_BATCH_TOKENS))
        parts = tuple(MicroBatch(0, one.rows) for one in plan.micro_batches)
        batch = Batch(self._number, "", tuple(Row(0.0, total) for _ in samples), (1,), parts)
        self._learner.train(batch, samples)
        self._number += 1


class Theirs:
    """transformers and torch's AdamW; the batch's gradients add up over forward passes of a few padded samples."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)

    def step(self, tokens: Sequence[Sequence[int]]) -> None:
        """One optimizer step."""
        total = sum(len(one) - 1 for one in tokens)
        self._optimizer.zero_grad()
        for begin in range(0, len(tokens), PADDED_TOGETHER):
            self._add_gradients(tokens[begin : begin + PADDED_TOGETHER], total)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()

    def _add_gradients(self, tokens: Sequence[Sequence[int]], total: int) -> None:
        longest = max(map(len, tokens))
        inputs = torch.tensor([[*one, *[0] * (longest - len(one))] for one in tokens])
        lengths = torch.tensor([len(one) for one in tokens])[:, None]
        real = torch.arange(longest)[None] < lengths
        labels = inputs.masked_fill(~real, -100)
        loss = self._model(inputs, attention_mask=real.long(), labels=labels, num_items_in_batch=total).loss
        loss.backward()


def compare(model: Path, lengths: Sequence[int], rounds: int) -> list[float]:
    """Median tokens/s of ours and of theirs."""
    tokens = draw(lengths, seed=2)
    sides = (Ours(model), Theirs(model))
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for side, spent in zip(sides, seconds, strict=True):
            begun = time.perf_counter()
            side.step(tokens)
            if number:  # the first warms up
                spent.append(time.perf_counter() - begun)
    megatron.destroy()
    return [sum(lengths) / median(spent) for spent in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description="Training speed on the CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        save_model(model, **SHAPE)
        for name, lengths in (("16 samples of 512 tokens", [512] * 16), ("32 samples, long tail", long_tail(32))):
            ours, theirs = compare(model, lengths, options.rounds)
            rows.append(
                {
                    "batch": name,
                    "trainer, tokens/s": round(ours),
                    "Hugging Face, tokens/s": round(theirs),
                    "ratio": f"{ours / theirs:.2f}",
                }
            )
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()

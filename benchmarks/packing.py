"""How well the schedule fills micro-batches and loads data-parallel ranks, in the layouts of recipes and data-parallel.

    python -m benchmarks.packing

Batches of 1,024 samples whose lengths are log-normal between 200 and 32,768 tokens (median 4,000, sigma 1), ten seeds.
Slots are what the micro-batches hold; possible is what any schedule could use of them at most, with as many
micro-batches on every rank as there are tokens for. Imbalance is the work, in FLOPs, of the most loaded rank over the
mean.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.records import Row, table
from services.common.schedule import Layout, ScheduleStats, make_schedule
from services.trainer.flops import forward_flops
from services.trainer.model_config import read_config
from tests.model_configs import RECIPES

SAMPLES, SEEDS = 1024, 10
SHORTEST, LONGEST, MEDIAN, SIGMA = 200, 32768, 4000, 1.0
CASES = [
    ("DeepSeek-R1", 4, 1, 4, 16384),
    ("GLM-4.7", 4, 1, 2, 16384),
    ("Qwen3-30B-A3B", 4, 8, 1, 32768),
    ("Qwen3-30B-A3B", 1, 8, 1, 32768),
    ("Qwen3-30B-A3B", 1, 16, 1, 32768),
]
"""Model, optimizer steps of a batch, data-parallel and context-parallel ranks, tokens on a GPU."""


def draw_lengths(seed: int) -> list[int]:
    """Of the samples of a batch."""
    draw = random.Random(seed)
    drawn = (round(draw.lognormvariate(math.log(MEDIAN), SIGMA)) for _ in range(SAMPLES))
    return [min(LONGEST, max(SHORTEST, one)) for one in drawn]


def possible(lengths: Sequence[int], steps: int, data: int, capacity: int) -> float:
    """Tokens over the slots of as few micro-batches as could hold them, were samples divisible."""
    per_step = [sum(lengths[at * SAMPLES // steps : (at + 1) * SAMPLES // steps]) for at in range(steps)]
    return sum(lengths) / sum(-(-one // (data * capacity)) * data * capacity for one in per_step)


def schedule(model: str, steps: int, data: int, context: int, tokens: int, seed: int) -> ScheduleStats:
    """The quality of one batch's schedule."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(RECIPES[model]))
        flops = forward_flops(read_config(Path(folder)))
    layout = Layout(data, tokens, context, 1, True, flops.per_token, flops.per_token_squared)
    step_of = [row * steps // SAMPLES for row in range(SAMPLES)]
    return make_schedule(draw_lengths(seed), step_of, layout).stats


def measure(model: str, steps: int, data: int, context: int, tokens: int) -> Row:
    """One row: means over seeds, and the worst."""
    found = [schedule(model, steps, data, context, tokens, seed) for seed in range(SEEDS)]
    filled, spread = [one.packing_efficiency for one in found], [one.imbalance - 1 for one in found]
    bounds = [possible(draw_lengths(seed), steps, data, tokens * context) for seed in range(SEEDS)]
    return {
        "model": model,
        "optimizer steps": steps,
        "data x context ranks": f"{data} x {context}",
        "tokens on a GPU": f"{tokens:,}",
        "slots used, %": f"{100 * fmean(filled):.1f} ({100 * min(filled):.1f})",
        "possible, %": f"{100 * fmean(bounds):.1f} ({100 * min(bounds):.1f})",
        "imbalance, %": f"{100 * fmean(spread):.1f} ({100 * max(spread):.1f})",
    }


if __name__ == "__main__":
    sys.stdout.write(table([measure(*case) for case in CASES]) + "\n")

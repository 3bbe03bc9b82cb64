"""Speed and memory of the trainer on one GPU: a model's shape with random weights, 16,384 tokens in a micro-batch.

    python -m benchmarks.gpu_trainer --out trainer.json [--model deepseek-1b] [--profile]

A step is forward, backward and optimizer over one pack, with the policy loss on every token. Memory is the peak above
weights, gradients and optimizer state. MFU counts what services/trainer/flops.py does, three times (forward once,
backward twice), of 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import DEEPSEEK_1B, QWEN3
from benchmarks.records import need_gpus, table, write_record
from services.common.spec import RunSpec
from services.trainer import megatron
from services.trainer.batch import Batch, MicroBatch, Row, Sample
from services.trainer.flops import forward_flops
from services.trainer.model_config import read_config
from services.trainer.report import Report
from services.trainer.step import Learner

MODELS = {"qwen3-0.6b": QWEN3["0.6b"], "deepseek-1b": DEEPSEEK_1B}
PACKINGS = {
    "8 x 2,048": [2048] * 8,
    "1 x 16,384": [16_384],
    "16 x 1,024": [1024] * 16,
    "7 mixed": [300, 800, 1500, 2284, 2900, 3600, 5000],
}
PEAK_FLOPS = 989e12
"""Of an H200 in bfloat16."""
WARM_STEPS = 3


def make_learner(folder: Path, config: dict[str, Any]) -> Learner:
    """A model of random weights, and its optimizer."""
    (folder / "config.json").write_text(json.dumps(config))
    rollout = {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2, "max_response_tokens": 1024}
    spec = RunSpec.model_validate(
        {
            "run_id": "benchmark",
            "run_dir": folder,
            "model": {"hf_checkpoint": folder},
            "data": {"prompt_data": "prompts.jsonl", "max_prompt_tokens": 64},
            "rollout": rollout,
            "trainer": {"dtype": "bfloat16"},
        }
    )
    learner = Learner(spec, read_config(folder))
    for parameter in learner.chunks[0].parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    learner.optimizer.reload()
    return learner


def make_batch(lengths: list[int], vocabulary: int) -> tuple[Batch, list[Sample]]:
    """One pack; a sample of n tokens in the pack has n response tokens."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for length in lengths:
        tokens = torch.randint(0, vocabulary, (length + 1,), generator=draw).tolist()
        samples.append(Sample((tokens[0],), tuple(tokens[1:]), (-12.0,) * length, (1,) * length))
    rows = tuple(Row((-1.0) ** index, length) for index, length in enumerate(lengths))
    return Batch(0, "", rows, (len(rows),), (MicroBatch(0, tuple(range(len(rows)))),)), samples


class Steps:
    """Optimizer steps over one pack, and what their parts take."""

    def __init__(self, learner: Learner, lengths: list[int]) -> None:
        self.learner = learner
        self.batch, self.samples = make_batch(lengths, learner.model.vocabulary)
        self.packs = learner._packs_by_step(self.batch, self.samples)[0]
        self.items = list(zip(self.packs, learner._observe(self.packs, Report()), strict=True))

    def step(self) -> dict[str, float]:
        """One step. Milliseconds on the device of its parts, and of the host to enqueue forward and backward."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]

        def train_step(items: Any, model: Any) -> Any:
            log_probs, loss = self.learner._train_step(items, model)
            marks[1].record()
            return log_probs, loss

        start = time.perf_counter()
        marks[0].record()
        self.learner.optimizer.zero_gradients()
        self.learner._run(self.items, train_step, forward_only=False)
        marks[2].record()
        enqueued = time.perf_counter()
        self.learner.optimizer.step(0)
        marks[3].record()
        torch.cuda.synchronize()
        parts = [a.elapsed_time(b) for a, b in pairwise(marks)]
        names = ("forward_ms", "backward_ms", "optimizer_ms")
        total, host = 1e3 * (time.perf_counter() - start), 1e3 * (enqueued - start)
        return {**dict(zip(names, parts, strict=True)), "host_ms": host, "step_ms": total}

    def medians(self, count: int) -> dict[str, float]:
        """Of the parts of some steps, after some that are not counted."""
        found = [self.step() for _ in range(WARM_STEPS + count)][WARM_STEPS:]
        return {name: statistics.median(one[name] for one in found) for name in found[0]}


def wall_ms(function: Callable[[], object], count: int) -> float:
    """Median wall time, after one call that is not counted."""
    times = []
    for _ in range(1 + count):
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def measure(learner: Learner, name: str, count: int, base_bytes: int) -> dict[str, Any]:
    """One row of the table."""
    lengths = PACKINGS[name]
    start = time.perf_counter()
    steps = Steps(learner, lengths)
    steps.step()
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    row = steps.medians(count)
    peak = torch.cuda.max_memory_allocated() - base_bytes
    tokens, forward = sum(lengths), forward_flops(learner.model)
    flops = 3 * sum((forward.per_token + forward.per_token_squared * length) * length for length in lengths)
    return {
        "packing": name,
        "tok_s": tokens / row["step_ms"] * 1e3,
        "mfu_percent": 100 * flops / row["step_ms"] * 1e3 / PEAK_FLOPS,
        "peak_gb": peak / 1e9,
        **row,
        "observe_ms": wall_ms(lambda: learner._observe(steps.packs, Report()), count),
        "train_ms": wall_ms(lambda: learner.train(steps.batch, steps.samples), count),
        "first_s": first_s,
    }


def print_synchronisations(steps: Steps) -> None:
    """Where one step makes the host wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        steps.learner.optimizer.zero_gradients()
        steps.learner._run(steps.items, steps.learner._train_step, forward_only=False)
        steps.learner.optimizer.step(0)
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message))
    print(f"\n{sum(places.values())} waits for the device in one step")
    for place, number in places.most_common(12):
        print(f"  {number} x {place}")


def print_profile(steps: Steps) -> None:
    """The most expensive kernels of two steps, and how long the device idles between the first and the last."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        steps.step()
        steps.step()
    events = [
        one
        for one in profiler.events() or []
        if str(one.device_type).endswith("CUDA") and not getattr(one, "is_user_annotation", False)
    ]
    ranges = sorted((one.time_range.start, one.time_range.end) for one in events)
    busy, end = 0.0, ranges[0][0]
    for start, stop in ranges:
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    print(f"\ndevice idle {100 * (1 - busy / (end - ranges[0][0])):.1f} % of two steps")
    kernels: dict[str, list[float]] = {}
    for one in events:
        kernels.setdefault(one.name, []).append(one.time_range.end - one.time_range.start)
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:30]:
        print(f"{sum(times) / 2e3:8.2f} ms {len(times) // 2:5} calls a step  {name[:140]}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the figures, as JSON")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row")
    parser.add_argument("--profile", action="store_true", help="also print kernels, idle time and waits of the host")
    options = parser.parse_args()
    need_gpus(parser)
    megatron.initialize(seed=1)
    with tempfile.TemporaryDirectory() as folder:
        learner = make_learner(Path(folder), MODELS[options.model])
    base_bytes = torch.cuda.memory_allocated()
    rows = [measure(learner, name, options.steps, base_bytes) for name in PACKINGS]
    print(table(rows), f"\nweights, gradients and optimizer state: {base_bytes / 1e9:.1f} GB", flush=True)
    if options.profile:
        steps = Steps(learner, PACKINGS["8 x 2,048"])
        print_profile(steps)
        print_synchronisations(steps)
    write_record(options.out, f"trainer {options.model}", rows)
    megatron.destroy()


if __name__ == "__main__":
    main()

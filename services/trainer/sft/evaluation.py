"""The mean loss of a checkpoint over a data file, on one rank."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import FailedPrecondition
from services.common.spec.sft import SftSpec
from services.trainer import megatron
from services.trainer.checkpoint import find_checkpoint
from services.trainer.loading import load_weights
from services.trainer.policy import Policy
from services.trainer.run_model import run_model
from services.trainer.sft.data import load_data
from services.trainer.sft.run import batch_layout
from services.trainer.sft.samples import make_batch

LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a checkpoint makes of a data file."""

    loss: float
    """Mean negative log-likelihood of the learned tokens, in nats."""
    tokens: int
    """That are learned."""
    samples: int
    overlong: int
    """Rows left out because they are too long."""

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is beyond all numbers."""
        return math.inf if self.loss > LARGEST_EXPONENT else math.exp(self.loss)


def evaluate(spec: SftSpec, source: Path | None = None) -> Evaluation:
    """Evaluate the model of a spec on its data, each row once. Memory holds the weights alone, no optimizer.

    Args:
        spec: Of a run, or made for this alone.
        source: Checkpoint of a run, or a run, for its newest one; None takes the Hugging Face checkpoint.

    Raises:
        SpecError: A row cannot be used.
        FailedPrecondition: The model is not supported, the run has no usable checkpoint, or the loss is not finite.
    """
    model = run_model(spec)
    data = load_data(spec.data, spec.model.hf_checkpoint, model.vocabulary)
    megatron.hush()
    megatron.initialize(spec.trainer.seed, hang_timeout_s=spec.trainer.hang_timeout_s)
    try:
        policy = Policy(spec, model)
        if source:
            load_weights(find_checkpoint(source), policy.chunks)
        else:
            policy.load_initial_weights()
        layout, loss, size = batch_layout(spec, model), 0.0, spec.sft.batch_size
        for begin in range(0, len(data.samples), size):
            samples = data.samples[begin : begin + size]
            made = make_batch(0, samples, layout, rank=0)
            loss += policy.evaluate(made.batch, made.samples) * sum(one.learned for one in samples)
    finally:
        megatron.destroy()
    if not math.isfinite(loss):
        raise FailedPrecondition(f"{source or spec.model.hf_checkpoint}: the loss is {loss}; a weight is not finite")
    tokens = sum(one.learned for one in data.samples)
    return Evaluation(loss / tokens, tokens, len(data.samples), data.overlong)

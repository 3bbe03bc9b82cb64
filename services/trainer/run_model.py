"""The model that a run trains."""

from __future__ import annotations

from services.common.spec import TrainingSpec
from services.trainer.hf_mtp import with_mtp
from services.trainer.model_config import ModelConfig, read_config


def run_model(spec: TrainingSpec) -> ModelConfig:
    """Read what the spec says of it. Raises ModelError for what is not supported, by its field."""
    model = read_config(spec.model.hf_checkpoint, spec.model.overrides)
    factor = spec.trainer.mtp_loss_scaling_factor
    return with_mtp(model, where=f"trainer.mtp_loss_scaling_factor = {factor}") if factor else model

"""The model that a run trains."""

from __future__ import annotations

from dataclasses import replace

from services.common.spec import TrainingSpec
from services.trainer.model_config import ModelConfig, ModelError, read_config


def run_model(spec: TrainingSpec) -> ModelConfig:
    """Read what the spec says of it; needs no torch.

    Raises:
        ModelError: Something is not supported, by its field.
        SpecError: A field of model.overrides does not fit the checkpoint.
    """
    model = read_config(spec.model.hf_checkpoint, spec.model.overrides)
    factor = spec.trainer.mtp_loss_scaling_factor
    return with_mtp(model, where=f"trainer.mtp_loss_scaling_factor = {factor}") if factor else model


def with_mtp(model: ModelConfig, *, where: str) -> ModelConfig:
    """The model with its layer for multi-token prediction. Raises ModelError, naming `where`, unless it has one."""
    if model.mtp_layers != 1:
        raise ModelError(
            f"{where}: num_nextn_predict_layers of the model is {model.mtp_layers}; only a model with 1 can have its "
            "layer for multi-token prediction trained"
        )
    return replace(model, mtp_built=True)

"""The spec of a run of reinforcement learning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import model_validator

from services.common.errors import InvalidArgument
from services.common.spec.reading import read_spec, resolved_table
from services.common.spec.reward import RewardSpec
from services.common.spec.rollout import AlgorithmSpec, DataSpec, EvaluationSpec, RolloutSpec
from services.common.spec.services import EngineSpec, RedisSpec, ServicesSpec, WeightSyncSpec
from services.common.spec.training import TrainingSpec

RUN_FILE = "run.toml"
"""In the directory of a run: its resolved spec."""


class RunSpec(TrainingSpec):
    """One run of reinforcement learning."""

    data: DataSpec
    evaluation: EvaluationSpec = EvaluationSpec()
    rollout: RolloutSpec
    algorithm: AlgorithmSpec = AlgorithmSpec()
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    engine: EngineSpec = EngineSpec()
    reward: RewardSpec = RewardSpec()
    services: ServicesSpec = ServicesSpec()
    redis: RedisSpec = RedisSpec()

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        samples = self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        if samples % self.algorithm.num_steps_per_rollout:
            raise ValueError(
                f"algorithm.num_steps_per_rollout = {self.algorithm.num_steps_per_rollout} does not divide the "
                f"{samples} samples of a batch (rollout_batch_size x n_samples_per_prompt)"
            )
        responses = {"rollout": self.rollout.max_response_tokens}
        if self.evaluation.sets:
            responses["evaluation"] = self.evaluation.max_response_tokens
        for section, response in responses.items():
            longest = self.data.max_prompt_tokens + response
            if longest > self.engine.max_model_len:
                raise ValueError(
                    f"engine.max_model_len = {self.engine.max_model_len} is shorter than data.max_prompt_tokens + "
                    f"{section}.max_response_tokens = {longest}"
                )
        if self.optimizer.lr_decay != "constant" and not self.optimizer.lr_decay_steps:
            steps = self.rollout.num_rollout * self.algorithm.num_steps_per_rollout
            raise ValueError(f"optimizer.lr_decay_steps: missing; the run has {steps} optimizer steps")
        return self

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        try:
            self.parallel.check_ranks(len(self.services.trainers))
        except InvalidArgument as error:
            raise ValueError(f"{error} (services.trainer and services.trainer_ranks)") from None
        return self

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        return len(self.services.trainers) // self.parallel.replica_ranks

    def files(self) -> dict[str, Path]:
        """What the run reads, by field."""
        sets = {f"evaluation.sets.{name}.prompt_data": one.prompt_data for name, one in self.evaluation.sets.items()}
        return {**super().files(), "data.prompt_data": self.data.prompt_data, **sets}


def load_run(path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> RunSpec:
    """Read, override and check a run spec.

    Args:
        path: The TOML file.
        overrides: `section.field=value` pairs; values are TOML, or text if they do not parse as TOML.
        environ: Where `FLOTILLA__SECTION__FIELD` variables are looked up.

    Raises:
        SpecError: The file is missing or malformed, a key is unknown, or a value cannot work.
    """
    return _resolve(read_spec(RunSpec, path, overrides, environ), path.resolve().parent)


def _resolve(spec: RunSpec, base: Path) -> RunSpec:
    table = resolved_table(spec, base)
    table["data"]["prompt_data"] = base / spec.data.prompt_data
    for one in table["evaluation"]["sets"].values():
        one["prompt_data"] = base / one["prompt_data"]
    for name in ("password_file", "tls_ca_file"):
        if table["redis"][name] != Path():
            table["redis"][name] = base / table["redis"][name]
    return RunSpec.model_validate(table)

"""The run spec: one immutable TOML file says everything about a run.

`load_run` reads the file, then applies environment variables (`FLOTILLA__ROLLOUT__ROLLOUT_BATCH_SIZE=16`), then
`--set rollout.rollout_batch_size=16`. Unknown keys are errors. Relative paths are relative to the file.
"""

from services.common.spec.base import SpecError
from services.common.spec.reading import ENV_PREFIX, check_same_run, explain, make_spec
from services.common.spec.reward import BOXED, BUILT_IN_GRADERS, MAX_CUSTOM_TIMEOUT_S, RewardSpec, check_built_in
from services.common.spec.rollout import DataSpec, RolloutSpec
from services.common.spec.run import RUN_FILE, RunSpec, load_run
from services.common.spec.services import DeviceEndpoint, Endpoint, RedisSpec, ServicesSpec, WeightSyncSpec
from services.common.spec.training import (
    LAYOUT_SECTIONS,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    TrainerSpec,
    TrainingSpec,
)

__all__ = [
    "BOXED",
    "BUILT_IN_GRADERS",
    "ENV_PREFIX",
    "LAYOUT_SECTIONS",
    "MAX_CUSTOM_TIMEOUT_S",
    "RUN_FILE",
    "DataSpec",
    "DeviceEndpoint",
    "Endpoint",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelSpec",
    "RedisSpec",
    "RewardSpec",
    "RolloutSpec",
    "RunSpec",
    "ServicesSpec",
    "SpecError",
    "TrainerSpec",
    "TrainingSpec",
    "WeightSyncSpec",
    "check_built_in",
    "check_same_run",
    "explain",
    "load_run",
    "make_spec",
]

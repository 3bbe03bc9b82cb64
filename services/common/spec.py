"""The run spec: one immutable TOML file says everything about a run.

`load_run` reads the file, then applies environment variables (`FLOTILLA__ROLLOUT__ROLLOUT_BATCH_SIZE=16`), then
`--set rollout.rollout_batch_size=16`. Unknown keys are errors. Relative paths are relative to the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from services.common.errors import InvalidArgument

ENV_PREFIX = "FLOTILLA__"
LAYOUT_SECTIONS = {"run_dir", "services", "redis", "parallel"}
"""What says where things run, not what they compute; left out of the spec digest."""


HOOK = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""A function by import path, `package.module:function`."""

BUILT_IN_GRADERS = ("deepscaler", "deepscaler_plus", "math", "dapo", "f1", "gpqa", "ifbench")
REMOTE_GRADER = "remote"
REMOTE_URL = r"(https?://\S+|grpc://[^\s/]+:\d+/\S+)?"
MAX_CUSTOM_TIMEOUT_S = 600.0
BOXED = "boxed_"
"""Before a grader's name: only the last box of the response is graded."""


def check_built_in(grader: str, others: str = "") -> None:
    """Raise ValueError if there is no built-in grader of this name; `others` are more names to offer."""
    if grader.removeprefix(BOXED) not in BUILT_IN_GRADERS:
        raise ValueError(f"unknown grader {grader!r}; there are: {', '.join(BUILT_IN_GRADERS)}{others}")


class SpecError(ValueError):
    """The run spec cannot be used; the message names the file and the field."""


class Strict(BaseModel):
    """Base of every section: immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSpec(Strict):
    """The model."""

    hf_checkpoint: Path
    """Directory of a Hugging Face checkpoint: config, tokenizer, safetensors. Initial weights."""
    load: Path = Path()
    """Directory that `flotilla convert hf-to-torch-dist` wrote of it, or a checkpoint of another run: the trainer's
    initial weights, optimizer anew. Empty takes those of hf_checkpoint."""


class DataSpec(Strict):
    """The prompts."""

    prompt_data: Path
    """JSONL or Parquet file, one prompt a row."""
    input_key: str = "prompt"
    """Field with the prompt: text, or a list of {role, content} messages."""
    label_key: str = "label"
    """Field with the label: text, or a number."""
    metadata_key: str = "metadata"
    """Field with an object for the grader, which a row need not have; its `rm_type` names the row's grader."""
    apply_chat_template: bool = True
    """Render the prompt with the tokenizer's chat template; off takes text as it is."""
    shuffle: bool = True
    """Permute the prompts anew in every data epoch, by seed + epoch."""
    seed: int = 42
    """Seed of the permutation."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Longer prompts are dropped at load, and counted."""


class EvaluationSetSpec(Strict):
    """One evaluation data set; keys and template as in [data]."""

    prompt_data: Path
    """JSONL or Parquet file."""
    max_prompts: int = Field(default=0, ge=0)
    """Only the first so many prompts; 0 takes all."""


class EvaluationSpec(Strict):
    """Evaluation of policy versions on data that is not trained on."""

    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")], EvaluationSetSpec] = {}
    """Data sets by name; none switches evaluation off."""
    interval: int = Field(default=20, ge=1)
    """Evaluate every so many rollout steps, before the first and after the last."""
    n_samples_per_prompt: int = Field(default=1, ge=1, le=1024)
    """Samples of each prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response."""
    deadline_s: float = Field(default=600, gt=0)
    """An evaluation that takes longer ends; what is missing counts as failed."""


class RolloutSpec(Strict):
    """What is generated, and what of it is kept."""

    num_rollout: int = Field(ge=1)
    """Rollout steps of the whole run."""
    rollout_batch_size: int = Field(ge=1)
    """Groups in a batch."""
    n_samples_per_prompt: int = Field(ge=2, le=1024)
    """Samples in a group; the baseline needs at least two."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, in the engine and in the trainer."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response."""
    seed: int = 0
    """Base of the sampling seeds."""
    over_sampling_batch_size: int = Field(default=0, ge=0)
    """Groups that may be kept or in play for one batch, at least rollout_batch_size; 0 takes rollout_batch_size."""
    refill: Literal["estimate", "batch"] = "estimate"
    """What is issued when too few groups can still be kept: `estimate` what the measured keep rate says is missing,
    up to over_sampling_batch_size; `batch` over_sampling_batch_size at once."""
    dynamic_sampling_filter: str = Field(
        default="none", pattern=rf"^(none|nonzero_std|nonzero_std_with_fallback|{HOOK})$"
    )
    """`nonzero_std` drops a group if the unbiased std of its rewards is at most 1e-6; `nonzero_std_with_fallback` keeps
    it nevertheless where dropping it would leave too few; `package.module:function` decides by itself."""
    seal_window: int = Field(default=0, ge=0)
    """0 seals kept groups as they come, which favours short responses. W seals in the order of issue: a group waits
    while one that was issued W or more before it is undecided; 1 is strict order."""
    partial_rollout: bool = False
    """Continue what a seal interrupts under the next weights, instead of starting it anew."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train on tokens of older weights than those that finished a sample."""
    buffer_filter: str = Field(default="", pattern=rf"^({HOOK})?$")
    """`package.module:function` that chooses which interrupted groups go on, and in which order; empty takes all,
    oldest first."""
    max_staleness: int = Field(default=0, ge=0)
    """Batches that may be generated ahead of the live weights: 0 trains and generates in turn, 1 overlaps them."""
    max_sample_age: int = Field(default=-1, ge=-1)
    """Oldest weights that a sample may come from, in batches before its own; -1 takes max_staleness, plus 2 with
    partial_rollout, and at least what surplus kept groups need."""
    age_wait_s: float = Field(default=600, gt=0)
    """How long a seal waits for groups that would be too old for the next batch."""
    lease_ttl_s: float = Field(default=20.0, ge=1)
    """A gateway that does not renew within it loses its groups. It saves tokens three times in it."""
    max_attempts: int = Field(default=10, ge=1)
    """Failed attempts after which a group is FAILED."""
    shuffle_rewards: bool = False
    """A control experiment: permute the rewards inside each group, so that nothing can be learned from them."""

    @property
    def over_sampling(self) -> int:
        """over_sampling_batch_size, or what it is by default."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def surplus_groups(self) -> int:
        """Groups kept or in play beyond what the batches need, at most.

        Refill `batch` issues over_sampling_batch_size when one is missing."""
        return self.over_sampling - (self.rollout_batch_size if self.refill == "estimate" else 1)

    @property
    def least_sample_age(self) -> int:
        """What max_sample_age must allow so that nothing is too old in steady state.

        Work starts up to max_staleness ahead, surplus waits for the batches after, and what is interrupted ends in the
        next batch at the earliest."""
        batches = -(-self.surplus_groups // self.rollout_batch_size)
        return self.max_staleness + max(batches, int(self.partial_rollout))

    @property
    def sample_age(self) -> int:
        """max_sample_age, or what it is by default."""
        if self.max_sample_age >= 0:
            return self.max_sample_age
        return max(self.least_sample_age, self.max_staleness + (2 if self.partial_rollout else 0))

    @model_validator(mode="after")
    def _sampling_works(self) -> Self:
        if self.over_sampling < self.rollout_batch_size:
            raise ValueError(
                f"over_sampling_batch_size = {self.over_sampling_batch_size} is below rollout_batch_size = "
                f"{self.rollout_batch_size}; raise it, or leave it out"
            )
        if self.sample_age < self.least_sample_age:
            raise ValueError(
                f"max_sample_age = {self.max_sample_age} cannot work: with max_staleness, partial_rollout, refill and "
                f"over_sampling_batch_size as they are, samples get {self.least_sample_age} or more batches old; "
                f"set at least {self.least_sample_age}, or leave it out"
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise ValueError("mask_offpolicy_in_partial_rollout needs partial_rollout = true")
        return self


class AlgorithmSpec(Strict):
    """The loss: GRPO, the group-normalised reward for every token (arXiv 2402.03300), with a clipped ratio."""

    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip of the probability ratio."""
    eps_clip_high: float = Field(default=0.28, gt=0)
    """Upper clip (arXiv 2503.14476, clip-higher)."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps on one batch."""


class OptimizerSpec(Strict):
    """AdamW, through Megatron's optimizer."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    lr_decay: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to `min_lr` along half a cosine."""
    lr_decay_steps: int = Field(default=0, ge=0)
    """Optimizer step at which it has fallen, counted from the start of the run; 0 takes the end of the run, which only
    supervised fine-tuning does."""
    min_lr: float = Field(default=0.0, ge=0)
    """Where it stays then."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled; not on norms and biases."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""


class TrainerSpec(Strict):
    """The trainer's process."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations; the optimizer keeps float32."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Packing limit; a longer sample goes alone."""
    balance_data: bool = False
    """Give the data-parallel ranks equal work, as estimated in FLOPs, instead of every n-th micro-batch."""
    save_interval: int = Field(default=20, ge=1)
    """A checkpoint every so many rollout steps, and at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older ones are removed once a newer one is committed."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads; 0 leaves it to torch."""
    hang_timeout_s: float = Field(default=600, gt=0)
    """A rank that begins nothing new for so long has failed, and all ranks are started again."""
    seed: int = 1234
    """Seed of Megatron's random-number states."""


class ParallelSpec(Strict):
    """How the model lies over the trainer's ranks; what is left of their number is data-parallel.

    Nothing here changes what is computed: a run may go on in another layout. Megatron's order, from neighbours
    outwards: tensor, context, expert, data, pipeline.
    """

    tensor: int = Field(default=1, ge=1)
    """Ranks that share every matrix, and the tokens between matrices (sequence parallelism)."""
    context: int = Field(default=1, ge=1)
    """Ranks that share the tokens of every sample. To the experts they are data-parallel ranks."""
    pipeline: int = Field(default=1, ge=1)
    """Stages of layers."""
    virtual_stages: int = Field(default=1, ge=1)
    """Parts of every stage, far from each other in the model (interleaved schedule): less of the time is spent waiting
    for other stages. The micro-batches of an optimizer step must then be a multiple of `pipeline`."""
    expert: int = Field(default=1, ge=1)
    """Ranks that share the experts of a layer."""
    expert_tensor: int = Field(default=1, ge=1)
    """Ranks that share the matrices of an expert."""
    first_stage_layers: int = Field(default=0, ge=0)
    """Layers of the first stage; 0 gives it as many as the others."""
    last_stage_layers: int = Field(default=0, ge=0)
    """Layers of the last stage; 0 gives it as many as the others."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass instead of being kept: `selective` those inside
    attention and inside layers of experts, `full` all but the input of every layer. The gradients are the same."""
    overlap: bool = False
    """Sum gradients over data-parallel ranks during the backward pass, and fetch weights from them during the forward
    pass, a group of layers at a time; else before and after the optimizer."""

    @property
    def micro_batch_multiple(self) -> int:
        """Divides the number of micro-batches that a rank has in an optimizer step."""
        return self.pipeline if self.virtual_stages > 1 else 1

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold one copy of the model, experts left out."""
        return self.tensor * self.context * self.pipeline

    @property
    def expert_replica_ranks(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.expert_tensor * self.expert * self.pipeline

    def check_ranks(self, ranks: int) -> None:
        """Raise InvalidArgument, naming the fields, if so many ranks cannot be laid out so."""
        copies = {
            "tensor x context x pipeline": self.replica_ranks,
            "expert_tensor x expert x pipeline": self.expert_replica_ranks,
        }
        for name, size in copies.items():
            if ranks % size:
                raise InvalidArgument(f"parallel: {name} = {size} does not divide the {ranks} ranks")


class WeightSyncSpec(Strict):
    """How weights travel to the engines."""

    quantization: Literal["fp8_block_128", "none"] = "fp8_block_128"
    """`fp8_block_128` sends linear layers as e4m3 with 128x128 scales; `none` sends every tensor as it is."""
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Tensors travel together up to this size."""
    session_timeout_s: float = Field(default=120, gt=0)
    """A transfer that takes longer is cut short and tried again."""


class EngineSpec(Strict):
    """The vLLM engines."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations in the engine."""
    max_model_len: int = Field(default=4096, ge=16)
    """Longest prompt and response together."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Samples that run at once inside vLLM; more wait there."""
    kv_cache_gib: float = Field(default=0, ge=0)
    """Size of the KV cache, in GiB; 0 takes 1 on CPU, and on a GPU what gpu_memory_utilization leaves.

    Set it where the engine shares its GPU: vLLM's own measurement fails if others free memory meanwhile."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes, weights included; weights on their way need space beside it."""
    enforce_eager: bool = True
    """Off compiles the model first: slower start, faster tokens."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of one engine; 0 leaves it to torch."""
    server_concurrency: int = Field(default=512, ge=1)
    """Samples that the gateway gives one engine at once."""


class RewardValues(Strict):
    """What verdicts are worth; graders with partial credit (`f1`, the user's own) say what a score is worth."""

    correct: float = 1.0
    """The answer equals the label."""
    wrong: float = 0.0
    """It does not."""
    no_answer: float = 0.0
    """There is no answer in the response."""
    no_think_tag: float = 0.0
    """The response never ends its thinking, and the grader asks for that."""
    truncated: float = 0.0
    """The response was cut off by its length before it gave an answer."""
    ungradable: float = 0.0
    """No response could be graded against the label."""
    timeout: float = 0.0
    """The grader did not finish within its deadline."""
    error: float = 0.0
    """The grader failed."""


class RewardSpec(Strict):
    """Grading."""

    grader: str = "deepscaler"
    """A built-in grader (docs/rewards.md), with or without `boxed_` before it; `remote`; or a function of your own,
    `package.module:function`. A row with `metadata.rm_type` chooses another built-in one for itself."""
    require_think: bool = True
    """A response that never closes `<think>` gets no reward; off also grades models that do not think aloud."""
    workers: int = Field(default=2, ge=1)
    """Worker processes; while one runs into its deadline, the others answer."""
    timeout_s: float = Field(default=1.0, gt=0)
    """Deadline of one item, from its dispatch to a worker."""
    max_queue: int = Field(default=8192, ge=1)
    """Items that may wait; more are refused."""
    values: RewardValues = RewardValues()
    """What verdicts are worth."""
    remote_url: str = ""
    """Where grader `remote` asks. http(s)://...: POST of JSON {prompt, response, label, metadata}, answered by a number
    or {"reward": number}. grpc://host:port/grader: a service that speaks flotilla.reward.v1."""
    custom_workers: int = Field(default=8, ge=1)
    """Worker processes of grader `remote` or of a function of your own: so many items are graded at a time."""
    custom_timeout_s: float = Field(default=10.0, gt=0, le=MAX_CUSTOM_TIMEOUT_S)
    """Deadline of one item (or group) of these, from its dispatch to a worker."""
    custom_per_group: bool = False
    """The function takes a list, the items of a group, and returns as many rewards, in their order."""

    @field_validator("grader")
    @classmethod
    def _grader_exists(cls, value: str) -> str:
        if value != REMOTE_GRADER and not re.fullmatch(HOOK, value):
            check_built_in(value, f", {REMOTE_GRADER}, package.module:function")
        return value

    @model_validator(mode="after")
    def _custom_fields_fit(self) -> Self:
        if (self.grader == REMOTE_GRADER) != bool(self.remote_url):
            raise ValueError('reward.remote_url belongs to reward.grader = "remote": give both or none')
        if not re.fullmatch(REMOTE_URL, self.remote_url):
            raise ValueError("reward.remote_url must be http(s)://host..., or grpc://host:port/grader")
        if self.custom_per_group and ":" not in self.grader:
            raise ValueError("reward.custom_per_group belongs to a function of your own in reward.grader")
        return self

    @property
    def is_custom(self) -> bool:
        """Whether the grader is none of the built-in ones."""
        return self.grader == REMOTE_GRADER or ":" in self.grader


class Endpoint(Strict):
    """Where one service listens."""

    host: str = "127.0.0.1"
    """Name or address that others use."""
    grpc_port: int = Field(ge=1, le=65535)
    """Port of its gRPC server."""
    http_port: int = Field(ge=1, le=65535)
    """Port of /livez, /readyz, /metrics and /statusz."""
    bind: str = "127.0.0.1"
    """Interface to listen on; only loopback unless told otherwise."""

    @property
    def grpc(self) -> str:
        """host:port of the gRPC server."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def http(self) -> str:
        """host:port of the HTTP server."""
        return f"{self.host}:{self.http_port}"


class DeviceEndpoint(Endpoint):
    """Where a process that computes on GPUs listens, and on which."""

    gpus: list[Annotated[int, Field(ge=0)]] = []
    """CUDA devices that `flotilla up` lets the process see; trainer and engine use the first. None named leaves all
    visible, or none where vLLM is installed for the CPU."""

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError(f"{value} names a GPU twice")  # CUDA would show the process none
        return value


def _default_endpoint(offset: int) -> Endpoint:
    return Endpoint(grpc_port=7700 + offset, http_port=7800 + offset)


def _default_device_endpoint(offset: int) -> DeviceEndpoint:
    return DeviceEndpoint(grpc_port=7700 + offset, http_port=7800 + offset)


class ServicesSpec(Strict):
    """Where the services listen."""

    buffer: Endpoint = _default_endpoint(0)
    """The buffer, with the run registry."""
    reward: Endpoint = _default_endpoint(1)
    """The reward service."""
    rollout_gateway: Endpoint = _default_endpoint(2)
    """The gateway."""
    trainer: DeviceEndpoint = _default_device_endpoint(3)
    """Rank 0 of the trainer, which serves TrainerService."""
    trainer_ranks: list[DeviceEndpoint] = []
    """The other ranks of the trainer, from rank 1 on."""
    trainer_meeting_port: int = Field(default=7705, ge=1, le=65535)
    """Where the ranks meet, on the host of rank 0; torchrun brings its own."""
    weight_sync: Endpoint = _default_endpoint(4)
    """The coordinator."""
    weight_agents: list[DeviceEndpoint] = Field(default=[_default_device_endpoint(10)], validate_default=True)
    """One for each trainer rank."""
    engines: list[DeviceEndpoint] = [_default_device_endpoint(20)]
    """One for each engine."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        """Naming one field of an endpoint keeps the defaults of the others."""
        if not isinstance(value, dict):
            return value
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        return {
            name: defaults[name].model_dump() | given
            if isinstance(given, dict) and isinstance(defaults.get(name), Endpoint)
            else given
            for name, given in value.items()
        }

    @field_validator("weight_agents")
    @classmethod
    def _one_for_each_rank(cls, value: list[DeviceEndpoint], info: ValidationInfo) -> list[DeviceEndpoint]:
        ranks = 1 + len(info.data.get("trainer_ranks", []))
        if len(value) != ranks:
            raise ValueError(f"there are {len(value)}, and the trainer has {ranks} ranks: give one for each")
        return value

    @field_validator("engines")
    @classmethod
    def _some_engine(cls, value: list[DeviceEndpoint]) -> list[DeviceEndpoint]:
        if not value:
            raise ValueError("give at least one engine")
        return value

    @property
    def trainers(self) -> list[DeviceEndpoint]:
        """All ranks of the trainer."""
        return [self.trainer, *self.trainer_ranks]


class RedisSpec(Strict):
    """The Redis that holds the ledger."""

    host: str = "127.0.0.1"
    """Name or address."""
    port: int = Field(default=7790, ge=1, le=65535)
    """Port."""
    maxmemory_mb: int = Field(default=2048, ge=64)
    """Limit of the Redis that `flotilla up` starts; it never evicts."""
    username: str = ""
    """ACL user; empty is the default user."""
    password_file: Path = Path()
    """File with the password; none is sent unless given."""
    tls: bool = False
    """Connect with TLS, and check the server's certificate."""
    tls_ca_file: Path = Path()
    """Certificates (PEM) that sign the server's; the system's unless given."""


class TrainingSpec(Strict):
    """What every run of the trainer has."""

    run_id: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Name of the run: lower-case letters, digits, - and _."""
    run_dir: Path = Path()
    """Checkpoints, logs and metrics; runs/<run_id> unless given."""
    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    trainer: TrainerSpec = TrainerSpec()
    parallel: ParallelSpec = ParallelSpec()

    def digest(self) -> str:
        """SHA-256 over what defines the run, in hexadecimal; where it runs is left out."""
        content = self.model_dump(mode="json", exclude=LAYOUT_SECTIONS)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def files(self) -> dict[str, Path]:
        """What the run reads, by field."""
        load = {"model.load": self.model.load / "state.json"} if self.model.load != Path() else {}
        return {"model.hf_checkpoint": self.model.hf_checkpoint / "config.json", **load}

    def check_files(self) -> None:
        """Raise SpecError if a file that the run reads is missing."""
        for field, path in self.files().items():
            if not path.is_file():
                raise SpecError(f"{field}: there is no file {path}; correct the path in the run spec")

    def to_toml(self) -> str:
        """The resolved spec as TOML that can be read back."""
        return tomli_w.dumps(self.model_dump(mode="json"))


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
            raise ValueError(f"{error} of the trainer (services.trainer and services.trainer_ranks)") from None
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


S = TypeVar("S", bound=TrainingSpec)


def read_spec(kind: type[S], path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> S:
    """As `load_run`, a spec of any kind, with its paths as they are given."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SpecError(f"{path}: there is no such run spec") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            _set(table, name.removeprefix(ENV_PREFIX).lower().split("__"), environ[name], name)
    return make_spec(kind, table, str(path), overrides)


def make_spec(kind: type[S], table: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> S:
    """A spec of the fields in `table`, which are changed as `overrides` say. Raises SpecError that names `origin`."""
    for pair in overrides:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(f"--set {pair}: write section.field=value")
        _set(table, key.strip().split("."), value.strip(), f"--set {pair}")
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise SpecError(explain(origin, error)) from None


def _set(table: dict[str, Any], keys: list[str], text: str, origin: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = table
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise SpecError(f"{origin}: {'.'.join(keys[:depth])} has no entry {key}")
            if last:
                node[int(key)] = value
            else:
                node = node[int(key)]
        elif not isinstance(node, dict):
            raise SpecError(f"{origin}: {'.'.join(keys[:depth])} is not a section")
        elif last:
            node[key] = value
        else:
            node = node.setdefault(key, {})


def explain(origin: str, error: ValidationError) -> str:
    """One line for each thing that is wrong, with where it was said and the field."""
    lines = []
    for one in error.errors():
        field = ".".join(str(part) for part in one["loc"])
        if one["type"] == "extra_forbidden":
            lines.append(f"{origin}: {field}: unknown key; remove it or correct its spelling")
        elif one["type"] == "missing":
            lines.append(f"{origin}: {field}: missing; add it")
        else:
            lines.append(": ".join(filter(None, (origin, field, one["msg"].removeprefix("Value error, ")))))
    return "\n".join(lines)


def resolved_table(spec: TrainingSpec, base: Path) -> dict[str, Any]:
    """The fields of a spec, with absolute paths where every run has paths; relative ones begin at `base`."""
    table = spec.model_dump()
    table["run_dir"] = base / (spec.run_dir if spec.run_dir != Path() else Path("runs") / spec.run_id)
    table["model"]["hf_checkpoint"] = base / spec.model.hf_checkpoint
    if spec.model.load != Path():
        table["model"]["load"] = base / spec.model.load
    return table


def _resolve(spec: RunSpec, base: Path) -> RunSpec:
    table = resolved_table(spec, base)
    table["data"]["prompt_data"] = base / spec.data.prompt_data
    for one in table["evaluation"]["sets"].values():
        one["prompt_data"] = base / one["prompt_data"]
    for name in ("password_file", "tls_ca_file"):
        if table["redis"][name] != Path():
            table["redis"][name] = base / table["redis"][name]
    return RunSpec.model_validate(table)

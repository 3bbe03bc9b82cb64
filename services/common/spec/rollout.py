"""Prompts, rollouts and evaluation, and what is learned from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.common.spec.base import HOOK, Strict


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

"""The spec of a run of supervised fine-tuning: as a run spec, with data and epochs in place of rollouts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from services.common.spec.base import Strict
from services.common.spec.reading import read_spec, resolved_table
from services.common.spec.training import TrainingSpec

SPEC_FILE = "sft.toml"
"""In the directory of a run: its resolved spec."""


class SftDataSpec(Strict):
    """The samples."""

    path: Path
    """JSONL or Parquet file, one sample a row: messages, or prompt and response."""
    messages_key: str = "messages"
    """Field with the messages of a conversation; the assistant's are learned."""
    prompt_key: str = "prompt"
    """Field with text or token ids, taken as they are, where a row has no messages."""
    response_key: str = "response"
    """The same; the response is learned."""
    shuffle: bool = True
    """Permute the samples anew in every epoch, by seed + epoch."""
    seed: int = 42
    """Seed of the permutation."""
    max_tokens: int = Field(default=4096, ge=2)
    """Longest sample, prompt and response together."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """What is done about a longer one: end with an error that names its row, or leave it out, counted."""


class SftSection(Strict):
    """How much is learned."""

    batch_size: int = Field(ge=1)
    """Samples of an optimizer step."""
    epochs: int = Field(default=1, ge=1)
    """How often every sample is used. Batches go on over the end of an epoch; the last one may be smaller."""


class SftSpec(TrainingSpec):
    """One run of supervised fine-tuning."""

    data: SftDataSpec
    sft: SftSection

    def files(self) -> dict[str, Path]:
        """What the run reads, by field."""
        return {**super().files(), "data.path": self.data.path}


def load_sft(path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> SftSpec:
    """Read, override and check a spec; as services.common.spec.load_run."""
    spec, base = read_spec(SftSpec, path, overrides, environ), path.resolve().parent
    table = resolved_table(spec, base)
    table["data"]["path"] = base / spec.data.path
    return SftSpec.model_validate(table)

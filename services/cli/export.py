"""`flotilla export`: a checkpoint of a run as a Hugging Face checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from services.cli.run_argument import load_spec, spec_beside
from services.trainer.convert import Output, run, to_hf


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="Its newest checkpoint, or this one.")],
    output: Output,
) -> None:
    """Write a checkpoint of a run as a Hugging Face checkpoint, with config and tokenizer of model.hf_checkpoint."""
    run(partial(_export, source.resolve(), output))


def _export(source: Path, output: Path) -> None:
    spec = load_spec(spec_beside(source))
    from services.trainer.checkpoint import find_checkpoint  # here, because it takes seconds

    to_hf(find_checkpoint(source), spec.model.hf_checkpoint, output, spec.model.overrides)

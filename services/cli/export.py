"""`flotilla export`: a checkpoint of a run as a Hugging Face checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from services.cli.preflight import RUN_FILE
from services.common.errors import InvalidArgument
from services.common.spec import load_run
from services.trainer.convert import Output, run, to_hf


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="Its newest checkpoint, or this one.")],
    output: Output,
) -> None:
    """Write a checkpoint of a run as a Hugging Face checkpoint, with config and tokenizer of model.hf_checkpoint."""
    run(partial(_export, source.resolve(), output))


def _export(source: Path, output: Path) -> None:
    from services.trainer.checkpoint import checkpoint_path, checkpoint_steps  # here, because it takes seconds

    checkpoints = source / "checkpoints"
    if steps := checkpoint_steps(checkpoints):
        source = checkpoint_path(checkpoints, steps[-1])
    elif (source / RUN_FILE).is_file():
        raise InvalidArgument(f"{checkpoints} has no checkpoint yet")
    run_file = source.parent.parent / RUN_FILE
    if not run_file.is_file():
        raise InvalidArgument(
            f"{source} belongs to no run: {run_file} is missing; see flotilla convert torch-dist-to-hf"
        )
    model = load_run(run_file, environ={}).model
    to_hf(source, model.hf_checkpoint, output, model.overrides)

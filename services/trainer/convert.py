"""Models between Hugging Face's layout and Megatron's torch_dist, as commands.

    flotilla convert hf-to-torch-dist --hf DIR --output DIR
    torchrun --nproc-per-node 8 -m services.trainer.convert hf-to-torch-dist --hf DIR --output DIR

are the same, by one process and by many, which torchrun may also start on many nodes with one file system.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from services.common.errors import FlotillaError
from services.common.service import EXIT_BAD_INPUT
from services.common.spec import ParallelSpec, SpecError

Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="New directory.")]
Size = partial(typer.Option, min=1, help="As in [parallel] of a run spec.")
Layers = partial(typer.Option, min=0, help="As in [parallel] of a run spec.")
SEED = 0
"""Nothing is drawn."""


def hf_to_torch_dist(
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="Hugging Face checkpoint, not quantised.")],
    output: Output,
    tensor: Annotated[int, Size("--tensor")] = 1,
    pipeline: Annotated[int, Size("--pipeline")] = 1,
    expert: Annotated[int, Size("--expert")] = 1,
    expert_tensor: Annotated[int, Size("--expert-tensor")] = 1,
    first_stage_layers: Annotated[int, Layers("--first-stage-layers")] = 0,
    last_stage_layers: Annotated[int, Layers("--last-stage-layers")] = 0,
) -> None:
    """Write the weights of a Hugging Face checkpoint for Megatron; a run may load them in another layout.

    Several processes each take a part, as the sizes say, which are those of a run spec. Without, the layers are split
    over all of them.
    """
    parallel = ParallelSpec(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
    )
    run(partial(_to_torch_dist, hf, output, parallel))


def torch_dist_to_hf(
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", metavar="DIR", help="Of hf-to-torch-dist, or a checkpoint of a run.")
    ],
    hf: Annotated[
        Path,
        typer.Option(
            "--hf", metavar="DIR", help="Checkpoint whose config, tokenizer and frozen layers for MTP are taken."
        ),
    ],
    output: Output,
) -> None:
    """Write the weights of a torch_dist directory as a Hugging Face checkpoint."""
    run(partial(to_hf, checkpoint, hf, output))


def run(tool: Callable[[], None]) -> None:
    """Run, and end the process with one line if the input cannot be used."""
    warnings.simplefilter("ignore")  # Megatron and torch speak of themselves
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        tool()
    except ModuleNotFoundError as error:
        typer.echo(f"this needs {error.name}; install it with `pip install {error.name}`", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except (FlotillaError, SpecError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None


def _to_torch_dist(hf: Path, output: Path, parallel: ParallelSpec) -> None:
    from services.trainer import megatron  # here, because it takes seconds
    from services.trainer.model_config import read_config
    from services.trainer.torch_dist import split_pipeline, write_torch_dist

    ranks = megatron.world_size()
    if parallel == ParallelSpec():
        parallel = split_pipeline(read_config(hf).layers, ranks)
    parallel.check_ranks(ranks)
    megatron.initialize(SEED, parallel)
    try:
        write_torch_dist(hf, output, parallel)
        _say_done(output, megatron.rank())
    finally:
        megatron.destroy()


def to_hf(checkpoint: Path, hf: Path, output: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> None:
    """As `torch_dist_to_hf`, with errors raised; `overrides` as in a run spec."""
    from services.trainer import megatron
    from services.trainer.torch_dist import write_hf

    megatron.initialize(SEED)
    try:
        write_hf(checkpoint, hf, output, overrides)
        _say_done(output, megatron.rank())
    finally:
        megatron.destroy()


def _say_done(output: Path, rank: int) -> None:
    if rank == 0:
        typer.echo(f"{output} is complete")


if __name__ == "__main__":
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.command("hf-to-torch-dist")(hf_to_torch_dist)
    app.command("torch-dist-to-hf")(torch_dist_to_hf)
    app()

"""The RUN argument that every command takes, and how bad input ends a command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from services.common.service import EXIT_BAD_INPUT
from services.common.spec import RUN_FILE, RunSpec, SpecError, load_run
from services.common.spec.sft import SPEC_FILE, SftSpec, load_sft

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run spec (TOML), or the directory of a run.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field.")]


def spec_file(run: Path) -> Path:
    """The run spec that the argument names."""
    return run / RUN_FILE if run.is_dir() else run


def spec_of_run(run: Path, overrides: list[str] | None) -> RunSpec:
    """The spec that the run was started with, if it was; else the one that is given. Exits if it cannot be used."""
    try:
        spec = load_run(spec_file(run), overrides or ())
        written = spec.run_dir / RUN_FILE
        return load_run(written, environ={}) if written.is_file() else spec
    except SpecError as error:
        refuse(error)


def spec_beside(source: Path) -> Path:
    """The spec that a run was started with, given the directory of the run or of one of its checkpoints.

    Raises:
        SpecError: It is neither.
    """
    for folder in (source, source.resolve().parent.parent):
        for name in (RUN_FILE, SPEC_FILE):
            if (folder / name).is_file():
                return folder / name
    if not source.is_dir():
        raise SpecError(f"there is no directory {source}")
    raise SpecError(
        f"{source} belongs to no run: there is neither {RUN_FILE} nor {SPEC_FILE}, which runs have in their directory. "
        "Of a torch_dist directory alone `flotilla convert torch-dist-to-hf` makes a Hugging Face checkpoint"
    )


def load_spec(file: Path) -> RunSpec | SftSpec:
    """A spec that `spec_beside` found, as the run was started with. Raises SpecError."""
    return load_run(file, environ={}) if file.name == RUN_FILE else load_sft(file, environ={})


def refuse(error: Exception | str) -> NoReturn:
    """Say what is wrong with the input, and exit."""
    typer.echo(str(error), err=True)
    sys.exit(EXIT_BAD_INPUT)

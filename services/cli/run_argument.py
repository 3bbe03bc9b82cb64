"""The RUN argument that every command takes, and how bad input ends a command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from services.cli.preflight import RUN_FILE
from services.common.service import EXIT_BAD_INPUT
from services.common.spec import RunSpec, SpecError, load_run

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


def refuse(error: Exception | str) -> NoReturn:
    """Say what is wrong with the input, and exit."""
    typer.echo(str(error), err=True)
    sys.exit(EXIT_BAD_INPUT)

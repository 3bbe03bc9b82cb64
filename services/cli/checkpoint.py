"""`flotilla verify` and `flotilla inspect`: two checkpoints compared, and what is in one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from services.cli.convert import CORES
from services.cli.loading import EXIT_INTERRUPTED, loading
from services.cli.progress import byte_progress
from services.cli.run_argument import refuse
from services.cli.supervisor import EXIT_FAILED
from services.common.errors import InvalidArgument
from services.weight_sync.checkpoints.summary import Part, Summary, folded_name, summarise
from services.weight_sync.checkpoints.weights import open_directory

if TYPE_CHECKING:
    from services.weight_sync.checkpoints.compare import Comparison

AS_JSON = typer.Option("--json", help="Print JSON, for scripts.")
PIPE_WIDTH = 200
"""Columns when nobody looks, so that nothing is cut."""


def verify(
    first: Annotated[Path, typer.Argument(metavar="A", help="Directory of a Hugging Face checkpoint.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    worst: Annotated[int, typer.Option("--worst", min=0, help="Show so many tensors, those that differ most.")] = 10,
    max_workers: Annotated[int, typer.Option("--max-workers", min=1, help="Threads; each compares a tensor.")] = CORES,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Compare two checkpoints, dequantised. Ends with 1 if they differ by more than rounding to fp8 does."""
    try:
        with loading():
            import torch  # here, because only this command needs it

            from services.weight_sync.checkpoints.compare import compare
    except ModuleNotFoundError as error:
        refuse(f"flotilla verify needs {error.name}; install it with `pip install {error.name}`")
    torch.set_num_threads(1)
    try:
        a, b = open_directory(first), open_directory(second)
        with byte_progress("comparing", sum(one.size_bytes for one in a.weights.values())) as advance:
            comparison = compare(a, b, max_workers, advance)
    except (InvalidArgument, OSError) as error:
        refuse(error)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps({"equal": comparison.equal, **asdict(comparison)}, indent=2))
    else:
        _show_comparison(comparison, first, second, worst)
    if not comparison.equal:
        raise typer.Exit(EXIT_FAILED)


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a Hugging Face checkpoint.")],
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Show names, shapes, dtypes, bytes and quantisation of a checkpoint. Reads headers only, and checks them."""
    try:
        summary = summarise(open_directory(directory))
    except (InvalidArgument, OSError) as error:
        refuse(error)
    if as_json:
        typer.echo(json.dumps(asdict(summary), indent=2))
    else:
        _show_summary(summary)


def _console() -> Console:
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def _table(first: str, *others: str) -> Table:
    """The first column is folded where there is no room, and nothing is cut."""
    return Table(Column(first, overflow="fold"), *(Column(one, no_wrap=True) for one in others))


def _show_comparison(comparison: Comparison, first: Path, second: Path, worst: int) -> None:
    differing = [one for one in comparison.differences if one.relative or not one.equal]
    table = _table("tensor", "difference", "fp8 errors", "equal")
    for one in differing[:worst]:
        units = "-" if one.units is None else f"{one.units:.3g}"
        table.add_row(one.name, f"{one.relative:.3g}", units, "yes" if one.equal else "NO")
    if table.row_count:
        _console().print(table)
    for only, directory in ((comparison.only_first, first), (comparison.only_second, second)):
        for name, count in Counter(map(folded_name, only)).items():
            typer.echo(f"only in {directory}: {_counted(count, name)}")
    shapes = Counter((folded_name(name), a, b) for name, a, b in comparison.shapes)
    for (name, a, b), count in shapes.items():
        typer.echo(f"{_counted(count, name)} is {list(a)} in {first} and {list(b)} in {second}")
    wrong = sum(not one.equal for one in comparison.differences)
    typer.echo(
        f"{len(comparison.differences)} tensors compared: {len(differing)} differ, {wrong} by more than they may; "
        f"{'equal' if comparison.equal else 'NOT equal'}"
    )


def _counted(count: int, name: str) -> str:
    return name if count == 1 else f"{count} x {name}"


def _show_summary(summary: Summary) -> None:
    rows = _table("tensor", "count", "shape", "dtype", "bytes")
    for row in summary.rows:
        shape = " x ".join(map(str, row.shape))
        rows.add_row(row.name, str(row.count), shape, row.dtype, decimal(row.size_bytes))
    parts = _table("part", "tensors", "parameters", "bytes")
    for part in (*summary.parts, summary.total):
        parts.add_row(*_part_cells(part))
    console = _console()
    console.print(f"{summary.model_type}, files: {summary.files}, quantisation: {summary.quantisation}")
    console.print(rows)
    console.print(parts)


def _part_cells(part: Part) -> tuple[str, str, str, str]:
    return part.name, str(part.tensors), f"{part.parameters:,}", f"{part.size_bytes:,}"

"""`flotilla verify` and `flotilla inspect`: two checkpoints compared, and what is in one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.cli.convert import CORES, byte_bar
from services.cli.run_argument import refuse
from services.cli.supervisor import EXIT_FAILED, EXIT_INTERRUPTED
from services.common.errors import InvalidArgument
from services.weight_sync.checkpoints.summary import Part, Summary, summarise
from services.weight_sync.checkpoints.weights import open_directory

if TYPE_CHECKING:
    from services.weight_sync.checkpoints.compare import Comparison

PIPE_WIDTH = 200
"""Columns when nobody looks, so that nothing is cut."""


def verify(
    first: Annotated[Path, typer.Argument(metavar="A", help="Directory of a Hugging Face checkpoint.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    worst: Annotated[int, typer.Option("--worst", min=0, help="Show so many tensors, those that differ most.")] = 10,
    max_workers: Annotated[int, typer.Option("--max-workers", min=1, help="Threads; each compares a tensor.")] = CORES,
) -> None:
    """Compare two checkpoints, dequantised. Ends with 1 if they differ by more than rounding to fp8 does."""
    try:
        import torch  # here, because only this command needs it

        from services.weight_sync.checkpoints.compare import compare
    except ModuleNotFoundError as error:
        refuse(f"flotilla verify needs {error.name}; install it with `pip install {error.name}`")
    torch.set_num_threads(1)
    try:
        a, b = open_directory(first), open_directory(second)
        with byte_bar() as bar:
            task = bar.add_task("comparing", total=sum(one.size_bytes for one in a.weights.values()))
            comparison = compare(a, b, max_workers, lambda count: bar.advance(task, count))
    except (InvalidArgument, OSError) as error:
        refuse(error)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show_comparison(comparison, first, second, worst)
    if not comparison.equal:
        raise typer.Exit(EXIT_FAILED)


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a Hugging Face checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
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
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _show_comparison(comparison: Comparison, first: Path, second: Path, worst: int) -> None:
    differing = [one for one in comparison.differences if one.relative or not one.equal]
    table = Table("tensor", "largest difference / largest element", "in units of fp8's error", "equal")
    for one in differing[:worst]:
        units = "-" if one.units is None else f"{one.units:.3g}"
        table.add_row(one.name, f"{one.relative:.3g}", units, "yes" if one.equal else "NO")
    if table.row_count:
        _console().print(table)
    for only, directory in ((comparison.only_first, first), (comparison.only_second, second)):
        for name in only:
            typer.echo(f"only in {directory}: {name}")
    for name, a, b in comparison.shapes:
        typer.echo(f"{name} is {list(a)} in {first} and {list(b)} in {second}")
    wrong = sum(not one.equal for one in comparison.differences)
    typer.echo(
        f"{len(comparison.differences)} tensors compared: {len(differing)} differ, {wrong} by more than they may; "
        f"{'equal' if comparison.equal else 'NOT equal'}"
    )


def _show_summary(summary: Summary) -> None:
    rows = Table("tensor", "count", "shape", "dtype", "quantisation", "bytes")
    for row in summary.rows:
        shape = " x ".join(map(str, row.shape))
        rows.add_row(row.name, str(row.count), shape, row.dtype, row.quantisation, f"{row.size_bytes:,}")
    parts = Table("part", "tensors", "parameters", "bytes")
    for part in (*summary.parts, summary.total):
        parts.add_row(*_part_cells(part))
    console = _console()
    console.print(
        f"{summary.model_type}, files: {summary.files}, quantisation: {summary.quantisation}", highlight=False
    )
    console.print(rows)
    console.print(parts)


def _part_cells(part: Part) -> tuple[str, str, str, str]:
    return part.name, str(part.tensors), f"{part.parameters:,}", f"{part.size_bytes:,}"

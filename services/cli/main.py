"""The `flotilla` command: start a run on this machine, look at it, end it, report on it; and tools for files."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from services.cli.buffer import app as buffer_app
from services.cli.checkpoint import inspect, verify
from services.cli.convert import app as convert_app
from services.cli.export import export
from services.cli.grade import grade
from services.cli.lock import lock_holder, stop_supervisor, supervisor_lock
from services.cli.observe import Observation, Observer
from services.cli.preflight import check_inputs, check_machine, make_run_dir, write_run_file
from services.cli.processes import Process, process_table
from services.cli.records import read_supervisor
from services.cli.run_argument import Overrides, RunArgument, refuse, spec_file, spec_of_run
from services.cli.session import run_session
from services.cli.sft import eval_loss, sft
from services.cli.supervisor import Outcome
from services.cli.table import LiveDisplay, PlainDisplay, draw_run
from services.cli.view import RunFiles, make_view
from services.common.lock import LockHeld
from services.common.spec import RUN_FILE, RunSpec, SpecError, load_run

DOWN_DEADLINE_S = 60.0
"""Three waves of at most 15 s, and some."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(buffer_app, name="buffer")
app.add_typer(convert_app, name="convert")
app.command()(export)
app.command()(grade)
app.command()(inspect)
app.command()(sft)
app.command()(eval_loss)
app.command()(verify)


@app.command()
def up(
    run: RunArgument,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved spec, check its files.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live table.")] = False,
) -> None:
    """Run everything on this machine until the run is complete. Ctrl-C stops it; `up` again continues it."""
    try:
        spec = load_run(spec_file(run), overrides or ())
        if dry_run:
            typer.echo(spec.to_toml(), nl=False)
            check_inputs(spec)
            return
        outcome = start(spec, Console(), plain=plain)
    except (SpecError, LockHeld) as error:
        refuse(error)
    if outcome.kind == "failed":
        typer.echo(f"{outcome.message}\n{outcome.detail}", err=True)
    raise typer.Exit(outcome.exit_code)


def start(spec: RunSpec, console: Console, *, plain: bool) -> Outcome:
    """Check, then run. Raises SpecError or LockHeld before anything has started."""
    check_inputs(spec)
    make_run_dir(spec)
    with supervisor_lock(spec.run_dir):
        check_machine(spec)
        run_file = write_run_file(spec)
        live = console.is_terminal and not plain
        with LiveDisplay(console) if live else PlainDisplay(console) as display:
            display.event(f"run {spec.run_id} in {spec.run_dir}")
            return asyncio.run(run_session(spec, process_table(spec, run_file), display))


@app.command()
def status(run: RunArgument, overrides: Overrides = None) -> None:
    """Show a run once, whoever started it."""
    spec = spec_of_run(run, overrides)
    processes = process_table(spec, spec.run_dir / RUN_FILE)
    seen = asyncio.run(_look_once(spec, processes))
    files = RunFiles(spec.run_dir)
    files.advance()
    record = read_supervisor(spec.run_dir) if lock_holder(spec.run_dir) else None
    view = make_view(spec, processes, seen, files, record)
    if not view.anyone:
        typer.echo(f"nothing of run {spec.run_id} answers; start it with `flotilla up`", err=True)
        raise typer.Exit(1)
    Console().print(draw_run(view))


async def _look_once(spec: RunSpec, processes: list[Process]) -> Observation:
    async with Observer(spec, processes) as observer:
        return await observer.look()


@app.command()
def down(run: RunArgument, overrides: Overrides = None) -> None:
    """End a run that `flotilla up` started; nothing that is finished is lost."""
    spec = spec_of_run(run, overrides)
    try:
        ended = stop_supervisor(spec.run_dir, DOWN_DEADLINE_S)
    except ProcessLookupError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if not ended:
        typer.echo(f"the run has not ended within {DOWN_DEADLINE_S:.0f} s; see {spec.run_dir / 'logs'}", err=True)
        raise typer.Exit(1)
    typer.echo(f"run {spec.run_id} is down")


@app.command()
def report(run: RunArgument, overrides: Overrides = None) -> None:
    """Write curves, transcripts and numbers of a run to RUN_DIR/report."""
    spec = spec_of_run(run, overrides)
    try:
        from services.cli.report import write_report  # here, because only this command needs matplotlib
    except ModuleNotFoundError as error:
        refuse(f"flotilla report needs {error.name}; install it with `pip install {error.name}`")
    try:
        text = write_report(spec.run_id, spec.run_dir)
    except SpecError as error:
        refuse(error)
    typer.echo(text, nl=False)


if __name__ == "__main__":
    app()

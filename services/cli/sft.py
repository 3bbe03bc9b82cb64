"""`flotilla sft` and `flotilla eval-loss`: supervised fine-tuning in this process, and the loss of a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from services.cli.loading import EXIT_INTERRUPTED, loading
from services.cli.run_argument import Overrides, refuse, spec_beside
from services.common.errors import FailedPrecondition
from services.common.spec import ModelSpec, SpecError, load_run, make_spec
from services.common.spec.sft import SPEC_FILE, SftSpec, load_sft

EVALUATION_BATCH = 64
"""Samples at a time; what a micro-batch holds is `trainer.max_tokens_per_micro_batch`."""


def sft(
    spec_file: Annotated[Path, typer.Argument(metavar="SFT", help="Spec of the run (TOML).")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved spec, check its files.")] = False,
) -> None:
    """Fine-tune a model on one rank. Ctrl-C stops it; the same command continues from the newest checkpoint."""
    try:
        spec = load_sft(spec_file, overrides or ())
        if dry_run:
            typer.echo(spec.to_toml(), nl=False)
        spec.check_files()
        if dry_run:
            return
        with loading():
            from services.trainer.sft.__main__ import main  # here, because only these commands need torch
    except SpecError as error:
        refuse(error)
    except ModuleNotFoundError as error:
        _refuse_without("sft", error)
    try:
        raise typer.Exit(main(spec))
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command continues", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def eval_loss(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face checkpoint; directory of a run, for its newest checkpoint; directory of one checkpoint; "
            "or spec of a run of `flotilla sft`.",
        ),
    ],
    data: Annotated[
        Path | None, typer.Argument(metavar="DATA", help="JSONL or Parquet; of a run of `flotilla sft` its own.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Say how likely a model finds a data file: loss and perplexity for each token that `flotilla sft` would learn."""
    try:
        spec, source = _choose(model, data, overrides or [])
        spec.check_files()
        with loading():
            from services.trainer.sft.evaluation import evaluate
        found = evaluate(spec, source)
    except (SpecError, FailedPrecondition) as error:
        refuse(error)
    except ModuleNotFoundError as error:
        _refuse_without("eval-loss", error)
    if as_json:
        perplexity = found.perplexity if math.isfinite(found.perplexity) else None  # JSON has no infinity
        numbers = {"loss": found.loss, "perplexity": perplexity, "tokens": found.tokens}
        typer.echo(json.dumps({**numbers, "samples": found.samples, "overlong": found.overlong}, indent=2))
        return
    left_out = f"; {found.overlong} longer than data.max_tokens left out" if found.overlong else ""
    typer.echo(
        f"loss {found.loss:.6g} nats a token, perplexity {found.perplexity:.6g}, "
        f"over {found.tokens:,} tokens of {found.samples:,} samples{left_out}"
    )


def _choose(model: Path, data: Path | None, overrides: list[str]) -> tuple[SftSpec, Path | None]:
    """What to evaluate: a spec, and the run or the checkpoint of one whose weights are meant, unless they are those of
    a Hugging Face checkpoint."""
    for path in (model, *filter(None, [data])):
        if not path.exists():
            raise SpecError(f"there is no file or directory {path}")
    pairs = [*([f"data.path={data.resolve()}"] if data else []), *overrides]
    if model.is_file():
        spec = load_sft(model, pairs)
        return spec, spec.run_dir
    if (model / "config.json").is_file():
        return _made_for(ModelSpec(hf_checkpoint=model), model, data, pairs), None
    file = spec_beside(model)
    if file.name == SPEC_FILE:
        return load_sft(file, pairs), model
    return _made_for(load_run(file, environ={}).model, model, data, pairs), model


def _made_for(model: ModelSpec, named: Path, data: Path | None, pairs: list[str]) -> SftSpec:
    """A spec for a model that was not fine-tuned here, `named` on the command line."""
    if data is None:
        raise SpecError(f"{named} has no data file of its own: give one too")
    table = {
        "run_id": "eval-loss",
        "model": {"hf_checkpoint": model.hf_checkpoint, "overrides": model.overrides},
        "data": {},
        "trainer": {"dtype": "float32"},
        "sft": {"batch_size": EVALUATION_BATCH},
    }
    return make_spec(SftSpec, table, str(named), pairs)


def _refuse_without(command: str, error: ModuleNotFoundError) -> NoReturn:
    refuse(f"flotilla {command} needs {error.name}; install it with `pip install {error.name}`")

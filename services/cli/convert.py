"""`flotilla convert`: checkpoints between bf16 and fp8, and between Hugging Face's layout and Megatron's torch_dist."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from services.cli.loading import EXIT_INTERRUPTED, loading
from services.cli.progress import byte_progress
from services.cli.run_argument import refuse
from services.common.errors import InvalidArgument
from services.trainer.convert import hf_to_torch_dist, torch_dist_to_hf
from services.weight_sync.layout import CHANNEL, TENSOR, Scaling

if TYPE_CHECKING:
    from services.weight_sync.checkpoints.plan import Conversion
    from services.weight_sync.checkpoints.weights import Contents

app = typer.Typer(no_args_is_help=True, help="Convert a checkpoint to another precision or layout, without a GPU.")
app.command("hf-to-torch-dist")(hf_to_torch_dist)
app.command("torch-dist-to-hf")(torch_dist_to_hf)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a Hugging Face checkpoint.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="New directory, or that of the same conversion, killed.")]
Workers = Annotated[int, typer.Option("--max-workers", min=1, help="Threads; each converts a file at a time.")]
CORES = os.cpu_count() or 1
BLOCK = (128, 128)


@app.command("fp8-to-bf16")
def fp8_to_bf16(source: Source, target: Target, max_workers: Workers = CORES) -> None:
    """Dequantise every fp8 matrix to bf16."""
    from services.weight_sync.checkpoints.plan import plan_bf16

    _convert(source, target, max_workers, plan_bf16)


@app.command("hf-to-fp8")
def hf_to_fp8(
    source: Source,
    target: Target,
    strategy: Annotated[
        Literal["block", "channel", "tensor"], typer.Option("--strategy", help="Which elements share a scale.")
    ] = "block",
    block_size: Annotated[
        tuple[int, int] | None,
        typer.Option("--block-size", metavar="ROWS COLUMNS", help="Of a block.  [default: 128 128]"),
    ] = None,
    ue8m0: Annotated[bool, typer.Option("--ue8m0", help="Round scales up to powers of two.")] = False,
    max_workers: Workers = CORES,
) -> None:
    """Quantise the linear layers of a model, from bf16, float16, float32, or from fp8 of another kind."""
    from services.weight_sync.checkpoints.formats import LARGEST_BLOCK
    from services.weight_sync.checkpoints.plan import plan_fp8

    if block_size and strategy != "block":
        refuse(f"--block-size is for --strategy block, not {strategy}")
    rows, columns = block_size or BLOCK
    if rows != columns or not 1 <= rows <= LARGEST_BLOCK:
        refuse(
            f"--block-size {rows} {columns}: two equal numbers from 1 to {LARGEST_BLOCK}, since vLLM uses one of them"
        )
    kind = {"block": Scaling(rows, columns), "channel": CHANNEL, "tensor": TENSOR}[strategy]
    scaling = Scaling(kind.rows, kind.columns, ue8m0)
    _convert(source, target, max_workers, lambda contents: plan_fp8(contents, scaling))


def _convert(source: Path, target: Path, workers: int, make_plan: Callable[[Contents], Conversion]) -> None:
    try:
        with loading():
            import torch  # here, because only these commands need it

            from services.weight_sync.checkpoints.convert import convert, is_complete, left_bytes
            from services.weight_sync.checkpoints.weights import open_directory
    except ModuleNotFoundError as error:
        refuse(f"flotilla convert needs {error.name}; install it with `pip install {error.name}`")
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        plan = make_plan(open_directory(source))
        if is_complete(plan, target):
            typer.echo(f"{target} is complete already")
            return
        total = sum(shard.read_bytes for shard in plan.shards)
        with byte_progress("converting", total, done=total - left_bytes(plan, target)) as advance:
            convert(plan, target, workers, advance)
    except (InvalidArgument, OSError) as error:
        refuse(error)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command continues", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(_report(plan, target, time.monotonic() - began))


def _report(plan: Conversion, target: Path, seconds: float) -> str:
    from services.weight_sync.checkpoints.folder import left_files

    jobs = [job for shard in plan.shards for job in shard.jobs]
    quantised = sum(job.scaling is not None for job in jobs)
    dequantised = sum(job.scaling is None and job.weight.scale is not None for job in jobs)
    size = sum(shard.size_bytes for shard in plan.shards)
    done = f"{quantised} matrices quantised, {dequantised} dequantised, {len(jobs) - quantised - dequantised} copied"
    report = f"{target}: {done}; {size:,} bytes of weights, {seconds:.1f} s"
    others = [f"not copied: {', '.join(map(str, files))}"] if (files := left_files(plan.source)) else []
    return "\n".join([report, *_left_out(plan), *others])


def _left_out(plan: Conversion) -> list[str]:
    """What a user might have expected to become fp8 and did not, by kind and shape."""
    from services.weight_sync.checkpoints.summary import folded_name

    kinds = Counter((folded_name(one.name), one.entry.shape) for one in plan.left_out)
    heading = "not quantised, because of the source's config or of blocks that do not fit (docs/checkpoints.md):"
    lines = [f"  {count} x {name} {list(shape)}" for (name, shape), count in kinds.items()]
    return [heading, *lines] if lines else []

"""`python -m demo`: a tiny model learns to solve word problems by GRPO, through all five services, on two cores.

Warm start (or a model of your own) -> prompt files -> run spec -> `flotilla up` -> `flotilla report`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from demo.checks import check_model
from demo.data import HELD_OUT_ROWS, TRAINING_ROWS, write_prompts
from demo.outcome import Judgement, judge, judge_control, judge_quick, read_gain, read_rewards
from demo.problems import Split
from demo.spec import Inputs, arithmetic_spec, own_model_spec
from services.cli.preflight import check_gpus, count_gpus
from services.cli.records import read_supervisor
from services.common.prompts import check_rows
from services.common.service import EXIT_BAD_INPUT
from services.common.spec import RUN_FILE, DataSpec, RunSpec, SpecError, check_same_run, load_run

STEPS = 40
QUICK_STEPS = 15
EXIT_NOT_LEARNED = 1
REPORT_EVERY_STEPS = 100
SPEC_FILE = "demo.toml"

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demo; the exit status says whether it worked."""
    args = parse_arguments()
    # Threads that spin while they wait take the processors from the other services of the run.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        spec_file = prepare(args)
    except SpecError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_INPUT
    if is_complete(spec_file.parent):
        console.print(f"{spec_file.parent} holds a finished run, shown again; --run-id starts another")
        return conclude(args, spec_file)
    if code := run_flotilla("up", spec_file):
        return code
    run_flotilla("report", spec_file)
    return conclude(args, spec_file)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--run-id", type=run_id, default="demo", help="name of the run; files go to ./runs/RUN_ID (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, help=f"rollout steps ({STEPS}; with --quick {QUICK_STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="of warm start, data and sampling (%(default)s)")
    parser.add_argument("--shuffle-rewards", action="store_true", help="a control: rewards permuted, nothing to learn")
    parser.add_argument("--model", type=Path, help="Hugging Face checkpoint directory to train instead")
    parser.add_argument("--data", type=Path, help="JSON lines with prompt and label, for --model")
    parser.add_argument("--eval-data", type=Path, help="the same, to evaluate on")
    parser.add_argument("--quick", action="store_true", help="fewer steps; passes if the reward rises by 0.1")
    parser.add_argument(
        "--gpus", type=gpus, default=(), help="CUDA devices: 0 for everything on one, 0,1 for trainer and engine apart"
    )
    args = parser.parse_args()
    if (args.model is None) != (args.data is None):
        parser.error("--model and --data go together")
    if args.eval_data and not args.data:
        parser.error("--eval-data needs --model and --data")
    return args


def is_complete(run_dir: Path) -> bool:
    """Whether an earlier `flotilla up` has finished the run."""
    record = read_supervisor(run_dir)
    return record is not None and record.outcome == "complete"


def positive(text: str) -> int:
    """A number of steps."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 1")
    return int(text)


def gpus(text: str) -> tuple[int, ...]:
    """One or two devices."""
    if not re.fullmatch(r"\d+(,\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: give one device, as 0, or two, as 0,1")
    return tuple(map(int, text.split(",")))


def run_id(text: str) -> str:
    """Check the name of a run before it becomes a directory."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: use lower-case letters, digits, - and _")
    return text


def prepare(args: argparse.Namespace) -> Path:
    """Make model, data and run spec, as far as they are not there; returns the spec's path.

    Raises:
        SpecError: Something that the user gave cannot be used; nothing has started.
    """
    run_dir = Path.cwd() / "runs" / args.run_id
    table = own_run(args, run_dir) if args.model else arithmetic_run(args, run_dir)
    try:
        spec = RunSpec.model_validate(table)
        check_same_run(spec, run_dir / RUN_FILE, load_run)
        check_gpus(spec, count_gpus())
        run_dir.mkdir(parents=True, exist_ok=True)
    except (OSError, ValidationError) as error:
        raise SpecError(f"{run_dir}: no run can be made there: {error}") from None
    spec_file = run_dir / SPEC_FILE
    spec_file.write_text(tomli_w.dumps(table))
    load_run(spec_file)
    if not args.model:
        write_prompts(run_dir / "train.jsonl", Split.TRAINING, TRAINING_ROWS, args.seed)
        write_prompts(run_dir / "held-out.jsonl", Split.HELD_OUT, HELD_OUT_ROWS, args.seed)
        warm_up(run_dir / "model", args.seed)
    return spec_file


def own_run(args: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """The spec of a run with the user's model and data, which are checked here."""
    context = check_model(args.model)
    for option, path in (("--data", args.data), ("--eval-data", args.eval_data)):
        if path:
            check_rows(option, path, DataSpec(prompt_data=path))
    evaluation = args.eval_data.resolve() if args.eval_data else None
    return own_model_spec(_inputs(args, run_dir, args.model.resolve(), args.data.resolve(), evaluation), context)


def arithmetic_run(args: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """The spec of a run on word problems."""
    return arithmetic_spec(
        _inputs(args, run_dir, run_dir / "model", run_dir / "train.jsonl", run_dir / "held-out.jsonl")
    )


def _inputs(args: argparse.Namespace, run_dir: Path, model: Path, prompts: Path, evaluation: Path | None) -> Inputs:
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    return Inputs(args.run_id, run_dir, model, prompts, evaluation, args.seed, steps, args.shuffle_rewards, args.gpus)


def warm_up(path: Path, seed: int) -> None:
    """Train the starting model into `path`, unless it is there already."""
    from demo.warm_start import Recipe, load_report, warm_start  # torch reads OMP_WAIT_POLICY when it is imported

    recipe = Recipe(seed=seed)
    report = load_report(path, recipe)
    if report is None:
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("warm start", total=recipe.steps)

            def show(stage: str, step: int) -> None:
                bar.update(task, completed=step, description=f"warm start, {stage}")
                if not console.is_terminal and step % REPORT_EVERY_STEPS == 0:
                    console.print(f"warm start, {stage}: step {step} of {recipe.steps}")

            report = warm_start(path, recipe, show)
    console.print(
        f"warm start: {report.parameters / 1e6:.2f} M parameters, {report.wall_s:.0f} s, "
        f"{report.accuracy:.0%} of held-out problems right; in {path}"
    )


def run_flotilla(command: str, spec_file: Path) -> int:
    """Run a `flotilla` command in the foreground; returns its exit status.

    Ctrl-C reaches it through the terminal; this process waits until it has stopped in order.
    """
    process = subprocess.Popen([sys.executable, "-m", "services.cli.main", command, str(spec_file)])
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        return process.wait()
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def conclude(args: argparse.Namespace, spec_file: Path) -> int:
    """Say what came of it and where everything is; returns the exit status."""
    run_dir = spec_file.parent
    places = {"run spec": spec_file, "metrics": run_dir / "metrics.jsonl", "evaluations": run_dir / "evaluations"}
    places |= {"report": run_dir / "report", "trained model": run_dir / "hf", "logs": run_dir / "logs"}
    for what, path in places.items():
        console.print(f"{what:>14}: {path}")
    if args.model:
        return 0
    judgement = judgement_of(args, run_dir)
    console.print(judgement.words)
    return 0 if judgement.passed else EXIT_NOT_LEARNED


def judgement_of(args: argparse.Namespace, run_dir: Path) -> Judgement:
    """What this kind of run must show."""
    if args.shuffle_rewards:
        return judge_control(read_gain(run_dir))
    if args.quick:
        return judge_quick(read_rewards(run_dir))
    return judge(read_rewards(run_dir), read_gain(run_dir))


if __name__ == "__main__":
    sys.exit(main())

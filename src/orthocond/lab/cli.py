"""The command line: ``orthocond demo``, ``train``, ``compare``, ``report``, ``bench``, ``diagnose`` ..."""

import dataclasses
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

import orthocond
from orthocond.diagnosis.script import PASSES, run_script
from orthocond.errors import ArgumentError, OrthocondError, check_choice
from orthocond.lab import demo
from orthocond.lab.compare import (
    ENGINES,
    Engine,
    LocalEngine,
    RayEngine,
    Run,
    compare,
    folder_of,
    num_cores,
    plan,
    summary,
)
from orthocond.lab.conditions import CONDITIONS, measure_of
from orthocond.lab.config import Config, changed, check_effect, from_toml
from orthocond.lab.data import load_data
from orthocond.lab.display import Display, LiveDisplay, PlainDisplay
from orthocond.lab.methods import ALL, PAPER, method, method_list
from orthocond.lab.paper import ITEMS, SCALES, chosen_items
from orthocond.lab.presets import PRESETS, preset
from orthocond.lab.report import write_report
from orthocond.lab.report.command import report
from orthocond.lab.runs import DivergedError, stored_config
from orthocond.treatments import TREATMENTS
from orthocond_command import is_first_process, tell_stopped

__all__ = ["app", "main"]


class _Stopped(Exception):  # noqa: N818
    """Ctrl-C as an exception that Typer passes on; on KeyboardInterrupt it ends the process without a word."""


class _Commands(TyperGroup):
    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise _Stopped from None


app = typer.Typer(
    cls=_Commands,
    help="Experiments with covariances that stay well conditioned.",
    epilog="Begin with: orthocond demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for every setting of `Config`, except those that it has itself; they come as a dict."""
    own = inspect.signature(command, eval_str=True)
    settings = {}
    for field in dataclasses.fields(Config):
        if field.name in own.parameters or not field.metadata:
            continue
        option = typer.Option(
            f"--{field.name.replace('_', '-')}",
            help=field.metadata["help"],
            metavar="VALUE",
            rich_help_panel="Settings",
        )
        settings[field.name] = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
        )

    def with_flags(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in settings}
        command(**given, settings={name: value for name, value in chosen.items() if value is not None})

    parameters = [
        value.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, value in own.parameters.items()
        if name != "settings"
    ]
    with_flags.__signature__ = inspect.Signature([*parameters, *settings.values()])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {value.name: value.annotation for value in (*parameters, *settings.values())}
    with_flags.__doc__ = command.__doc__
    return with_flags


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"orthocond {orthocond.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("train", epilog="Example: orthocond train dbn-digits --method svd+nog+ow+olr --seed 0 --out runs/first")
@_with_settings
def train_command(
    preset_name: Annotated[str, typer.Argument(metavar="PRESET", help="Preset name; orthocond presets lists them.")],
    settings: dict[str, str],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default: runs/PRESET/METHOD/seed-SEED.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder, if there is one.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over: move the run in the folder to FOLDER.old-1 first.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings; flags override it.")] = None,
) -> None:
    """Train a network; flags change any setting of the preset."""
    from orthocond.lab.train import train

    given = {**(from_toml(config) if config is not None else {}), **settings}
    chosen = changed(preset(preset_name), given)
    folder = out or folder_of(Path("runs") / chosen.preset, chosen)
    if resume and restart:
        raise ArgumentError("train takes --resume, which continues a run, or --restart, which starts over, not both.")
    stored = stored_config(folder) if resume or restart else None
    if stored is not None:
        chosen = changed(dataclasses.replace(stored, preset=chosen.preset), given)
    check_effect(given, chosen, [chosen.method])
    outcome = train(chosen, folder, resume=resume, restart=restart, display=display())
    if not is_first_process():
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if outcome.state == "interrupted":
        command = shlex.join(["orthocond", "train", preset_name, "--resume", "--out", str(folder)])
        console.print(f"stopped at step {outcome.step}; continue with: {command}")
        raise typer.Exit(130)
    error = "" if outcome.val_error is None else f"validation error {outcome.val_error:.2f}%, "
    console.print(f"{error}{outcome.step} steps, in {folder}")


@app.command(
    "compare", epilog="Example: orthocond compare dbn-digits --methods svd,svd+nog,bn --seeds 5 --out runs/sweep"
)
@_with_settings
def compare_command(
    preset_name: Annotated[str, typer.Argument(metavar="PRESET", help="Preset name; orthocond presets lists them.")],
    settings: dict[str, str],
    methods: Annotated[str, typer.Option(help="paper, all, or a list: svd,svd+nog.")] = "paper",
    seeds: Annotated[int, typer.Option(help="Number of seeds per method, starting at --seed.", min=1)] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; default: runs/PRESET.", show_default=False)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings; flags override it.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time on this machine.", min=1)] = 1,
    shard: Annotated[str, typer.Option(help="Part of the runs, for a job array: 3/8 is every third of eight.")] = "1/1",
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Ray cluster address.")] = None,
    cpus: Annotated[int, typer.Option(help="CPUs per run on the Ray cluster.", min=1)] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs per run on the Ray cluster.", min=0)] = 0,
) -> None:
    """Run methods x seeds; run it again to do only what is missing."""
    given = {**(from_toml(config) if config is not None else {}), **settings}
    if "method" in given:
        raise ArgumentError("compare takes --methods, not a single method.")
    chosen = changed(preset(preset_name), given)
    if chosen.data is not None:  # a run may be elsewhere
        chosen = dataclasses.replace(chosen, data=str(Path(chosen.data).resolve()))
    check_choice(engine, ENGINES, "engine", "compare")
    names = method_list(methods, with_gauge=chosen.can_be_gauged, defaults=chosen.parts)
    check_effect(given, chosen, names)
    runs = plan(chosen, names, seeds, out or Path("runs") / chosen.preset, _shard(shard))
    if engine == "ray" and (chosen.nodes > 1 or chosen.devices != "1"):
        raise ArgumentError("a run on a Ray cluster has one device; leave out --devices and --nodes.")
    if not runs:
        print(f"there is no run for the shard {shard}; nothing to do")
        return
    if any(not run.is_finished for run in runs):
        load_data(chosen)  # what is wrong with it is said once
    carry_out(runs, RayEngine(address, cpus, gpus) if engine == "ray" else LocalEngine(jobs))


@app.command("demo", epilog="Example: orthocond demo --out runs/demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/demo"),
    methods: Annotated[str, typer.Option(help="Methods to compare.")] = ",".join(demo.METHODS),
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=1)] = demo.SEEDS,
    jobs: Annotated[int, typer.Option(help="Runs at a time.", min=1)] = min(4, num_cores()),
) -> None:
    """Compare whitening that knows its rank with the usual one and with batch norm, on the embedded digits."""
    chosen = method_list(methods)
    runs = plan(demo.config(), chosen, seeds, out)
    console = Console(highlight=False, soft_wrap=True)
    left = sum(not run.is_finished for run in runs)
    console.print(
        f"{len(chosen)} methods x {seeds} seeds on 1,438 handwritten digits, {jobs} at a time: "
        + (f"{left} of {len(runs)} runs to do" if left else f"all done before, in {out}")
    )
    carry_out(runs, LocalEngine(jobs))
    console.print(f"The report: {write_report([out], out / 'report.html').resolve().as_uri()}")


app.command("report", epilog="Example: orthocond report runs/sweep -o report.html")(report)


@app.command("bench", epilog="Example: orthocond bench solvers --json results/bench/solvers.json")
def bench_command(
    subject: Annotated[
        str | None,
        typer.Argument(help="solvers, functions, polar, geometry, layers or step; default: all.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small problems and few rounds, to check that it runs.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="JSON file for the results and the environment.")] = None,
    preset_name: Annotated[
        str | None, typer.Option("--preset", help="For step: the preset whose network, layers and batch are timed.")
    ] = None,
    device: Annotated[str, typer.Option(help="For step: cpu, with at most 32 images, or cuda.")] = "cpu",
) -> None:
    """Measure speed and accuracy side by side with the alternatives."""
    from orthocond.lab.bench.promises import promises
    from orthocond.lab.bench.run import SUBJECTS, check_place, run, write_results
    from orthocond.lab.bench.tables import tables

    if subject is not None:
        check_choice(subject, SUBJECTS, "subject", "bench")
    options: dict[str, Any] = {"config": preset(preset_name)} if preset_name is not None else {}
    options |= {"device": _device(device)} if device != "cpu" else {}
    if options and subject != "step":
        raise ArgumentError("bench takes --preset and --device for a training step alone: orthocond bench step.")
    if json is not None:
        check_place(json)
    names = [subject] if subject is not None else list(SUBJECTS)
    results = run(names, quick=quick, console=Console(stderr=True), **options)
    if json is not None:
        write_results(results, json)
    found = results["subjects"]
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    for entry in [*(table for name in found for table in tables(name, found[name])), promises(found)]:
        console.print(f"\n{entry.title}\n{entry.note}", soft_wrap=True)
        table = Table(*entry.columns, box=None, pad_edge=False)
        for row in entry.rows:
            table.add_row(*row)
        console.print(table)


@app.command("paper", epilog="Example: orthocond paper figure1 --scale digits --seeds 2")
@_with_settings
def paper_command(
    settings: dict[str, str],
    items: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ITEM]...", help="table1 to table6, figure1 to figure5, or all; default: list them."),
    ] = None,
    scale: Annotated[str, typer.Option(help=f"{', '.join(SCALES)}: how large the runs are.")] = "digits",
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each method; the paper has ten on CIFAR.", min=1, show_default="2")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data, or with cifar10, cifar100 and imagenet in it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; default: runs/paper/SCALE.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time on this machine.", min=1, show_default=str(min(4, num_cores())))
    ] = None,
) -> None:
    """Run what a table or figure of the paper needs, and write it with the paper's numbers beside ours."""
    from orthocond.lab.report.item_page import label, write_items
    from orthocond.lab.reproduction import known_step_times, planned_runs, step_times

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not items:
        table = Table("item", "what it shows", "experiments", box=None, pad_edge=False)
        for item in ITEMS.values():
            table.add_row(item.name, f"{item.title}: {item.caption}", ", ".join(item.quotes))
        console.print(table)
        return
    chosen = chosen_items(items)
    folder = out or Path("runs") / "paper" / scale
    for name in ("method", "seed"):
        if name in settings:
            raise ArgumentError(f"paper takes its methods and seeds from the items; leave out --{name}.")
    runs = planned_runs(chosen, scale, seeds or 2, folder, data, settings)
    requested = [*settings, *(name for name, value in {"seeds": seeds, "data": data, "jobs": jobs}.items() if value)]
    if requested and not runs:
        flag = requested[0].replace("_", "-")
        raise ArgumentError(f"paper measures the time of a step with the settings of the scale; leave out --{flag}.")
    jobs = jobs or min(4, num_cores())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"can't write to {folder} ({error.strerror}); choose another folder with --out.") from None
    known_step_times(chosen, scale, folder)  # what is wrong with them is said before the runs
    left = [run for run in runs if not run.is_finished]
    todo = f"{len(left)} of {len(runs)} runs to do, {jobs} at a time." if runs else "The time of a step, no runs."
    console.print(f"{', '.join(label(item) for item in chosen)} at the scale {scale}: {SCALES[scale]}. {todo}")
    for config in {run.config.preset: run.config for run in left}.values():
        load_data(config)  # what is wrong with it is said once
    failed = compare(runs, LocalEngine(jobs), console) if runs else []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = step_times(chosen, scale, folder, device)
    name = chosen[0].name if len(chosen) == 1 else "paper"
    page = write_items(chosen, scale, runs, times, folder / f"{name}.html")
    tell_failed(runs, failed)
    console.print(f"The page: {page.resolve().as_uri()}")
    if failed:
        raise typer.Exit(1)


@app.command(
    "diagnose",
    epilog="Example: orthocond diagnose train.py --lr 0.1",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def diagnose_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Training script; its own arguments follow.")],
    passes: Annotated[int, typer.Option(help="Stop after this many backward passes.")] = PASSES,
) -> None:
    """Run a training script until the first NaN and say what its eigh, svd, cholesky and pinv do to the gradient."""
    raise typer.Exit(run_script(script, context.args, passes=passes))


@app.command("presets")
def presets_command() -> None:
    """List the experiments."""
    table = Table("preset", "what it is", "model", "epochs", "batch", box=None, pad_edge=False)
    for name, entry in PRESETS.items():
        table.add_row(
            name, entry.description, entry.config.model, str(entry.config.epochs), str(entry.config.batch_size)
        )
    Console().print(table)


@app.command("methods")
def methods_command() -> None:
    """List the methods of `paper` and `all`, and how to name more."""
    table = Table("method", "what it does", "in", box=None, pad_edge=False)
    for name in ALL:
        table.add_row(name, method(name).description, "paper, all" if name in PAPER else "all")
    console = Console()
    console.print(table)
    console.print(
        "\nAny other combination goes too: svd, newton_schulz or products, and treatments joined by +:\n",
        highlight=False,
    )
    treatments = Table("treatment", "what it does", box=None, pad_edge=False)
    for name, part in TREATMENTS.items():
        treatments.add_row(name, escape(part.description))
    console.print(treatments)


def carry_out(runs: list[Run], engine: Engine) -> None:
    """Do the runs of a sweep, print the table, and exit with 1 if some of them failed."""
    console = Console(highlight=False)
    failed = compare(runs, engine, console)
    console.print(summary(runs))
    console.print(
        "Validation error in percent, mean ± standard deviation over seeds. Condition number of the covariance, "
        + " or ".join(sorted({CONDITIONS[measure_of(run.config.eps)][0] for run in runs}))
        + ": median over the last tenth of the steps, geometric mean over seeds."
    )
    tell_failed(runs, failed)
    if failed:
        raise typer.Exit(1)


def tell_failed(runs: list[Run], failed: list[Run]) -> None:
    """Print the notes of finished runs, and why others failed."""
    for run in runs:
        if run.is_finished and (note := run.result()["note"]):
            print(note, file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed:", file=sys.stderr)
        for run in failed:
            print(f"  {run.name}: {run.problem} ({run.folder / 'log.txt'})", file=sys.stderr)


def _device(name: str) -> str:
    from orthocond.lab.bench.step import DEVICES

    check_choice(name, DEVICES, "device", "bench")
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("bench --device cuda needs a GPU that torch can use, and there is none; leave it out.")
    return name


def _shard(text: str) -> tuple[int, int]:
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ArgumentError(f"--shard takes a number and how many there are, 1/8 to 8/8, got {text!r}.")
    return int(number), int(of)


def display() -> Display:
    """Return what shows a run here: a live line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2."""
    try:
        app()
    except OrthocondError as error:
        if is_first_process():
            print(f"orthocond: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, DivergedError) else 2)
    except (KeyboardInterrupt, _Stopped):
        tell_stopped()
        sys.exit(130)
    except RuntimeError as error:
        if is_first_process():
            raise
        sys.exit(f"orthocond: a process of the run ended: {str(error).partition(chr(10))[0]}")

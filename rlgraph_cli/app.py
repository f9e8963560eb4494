"""The commands and their options. Nothing heavy is imported before a command runs, so help and mistakes in options come at once."""

import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlgraph_cli import cluster, doctor

if TYPE_CHECKING:
    from collections.abc import Callable

    import rlgraph as rg
    from rlgraph_cli.recipe import Recipe

app = typer.Typer(
    name="rlgraph",
    help="Train LLMs with RL as dataflow graphs: plan, run, watch and compare runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cluster.app, name="cluster")
app.add_typer(doctor.app, name="doctor")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE.py", help="A Python file with a dataclass Config and a function graph(cfg).")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe; config=FILE.yaml reads them from a file.")
]
NOTHING_STARTS = ("plan", "tune", "export", "report", "compare", "from-verl", "from-trl")  # whose errors are of the call or its files
MACHINE = "Another machine than this one"
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs of all hosts together.", rich_help_panel=MACHINE)]
Gpu = Annotated[str | None, typer.Option(help="The kind of GPU, as H100: times are then estimated for it.", rich_help_panel=MACHINE)]
GpusPerHost = Annotated[int | None, typer.Option(min=1, help="GPUs of a host (default: 8).", rich_help_panel=MACHINE)]
Cpus = Annotated[int | None, typer.Option(min=1, help="Cores of all hosts together (default: 8 a GPU).", rich_help_panel=MACHINE)]
Hosts = Annotated[int | None, typer.Option(min=1, help="Hosts.", rich_help_panel=MACHINE)]
OutFile = Annotated[Path | None, typer.Option("-o", "--out", help="The recipe to write (default: NAME.py).")]
Skip = Annotated[bool, typer.Option("--skip", help="Leave out unsupported settings; the table names them.")]
ShowPlan = Annotated[bool, typer.Option("--plan", help="Print the plan on the cluster that the script names.")]
RunIt = Annotated[bool, typer.Option("--run", help="Run the recipe.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the recipe, for --plan and --run.")]
CostsFile = Annotated[Path | None, typer.Option(help="Measured costs: the costs.yaml of a recorded run.")]


class By(StrEnum):
    """What `tune` ranks by."""

    tokens_per_s = "tokens_per_s"
    gpu_s_per_sample = "gpu_s_per_sample"


class Dtype(StrEnum):
    """What `export` writes weights in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Adapter(StrEnum):
    """How `export` writes an adapter."""

    merged = "merged"
    apart = "apart"


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("rlgraph-dataflow"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")] = False,
) -> None: ...


def main() -> None:
    """Run the command line. The exit code is 2 for a wrong call, setting or file, 1 for any other failure."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")  # a recipe that runs has its own sys.argv
    try:
        app()
    except Exception as error:  # noqa: BLE001 (the outer edge of the command)
        from rlgraph.errors import short, user_lines, whole_traces

        code = _exit_code(error, command)
        if code is None:  # a defect, or an error of the recipe's own code
            typer.echo(short(error), err=True)
        else:
            typer.echo(short(error) if whole_traces() else f"{user_lines(error)}error: {error}", err=True)
        raise SystemExit(code or 1) from None


def _exit_code(error: Exception, command: str) -> int | None:
    """Choose the exit code of an error that rlgraph raises on purpose, None for any other. Only a run can fail after it began."""
    if "rlgraph.errors" not in sys.modules:
        return None
    from rlgraph.errors import ConfigError, RlgraphError

    if isinstance(error, ConfigError) or (isinstance(error, RlgraphError) and command in NOTHING_STARTS):
        return 2
    return 1 if isinstance(error, RlgraphError) else None


@app.command()
def plan(
    recipe: RecipePath,
    settings: Settings = None,
    draw: Annotated[Path | None, typer.Option(help="Write the picture of the plan: .svg, or .mmd for Mermaid.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write the predicted timeline, for ui.perfetto.dev.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    costs: CostsFile = None,
    gpus: Gpus = None,
    gpu: Gpu = None,
    gpus_per_host: GpusPerHost = None,
    cpus: Cpus = None,
    hosts: Hosts = None,
) -> None:
    """Compile a recipe's graph, or its graphs, and print the plan of each. Nothing starts."""
    import rlgraph as rg
    from rlgraph_cli.recipe import read

    for option, file in (("--draw", draw), ("--timeline", timeline)):
        if file and not file.parent.is_dir():
            raise typer.BadParameter(f"the folder '{file.parent}' does not exist; make it first", param_hint=option)
    found = read(recipe)
    cfg = found.configured(settings or [])
    cluster = _cluster(found, cfg, gpus, gpu, gpus_per_host, cpus, hosts)
    plans = found.plans(cfg, cluster, rg.planning.Costs.from_file(costs) if costs else None)
    for made in plans:
        own = f".{made.graph}" if len(plans) > 1 else ""  # each of several graphs has its own files: plan.svg is plan.GRAPH.svg
        if draw:
            made.draw(draw.with_name(f"{draw.stem}{own}{draw.suffix}"))
        if timeline:
            made.timeline(timeline.with_name(f"{timeline.stem}{own}{timeline.suffix}"))
    if json:
        written = ",\n".join(made.to_json() for made in plans)
        typer.echo(written if len(plans) == 1 else f"[{written}]")
    else:
        typer.echo("\n\n".join(map(str, plans)))


@app.command()
def run(
    recipe: RecipePath,
    settings: Settings = None,
    profile: Annotated[str | None, typer.Option(metavar="STEP[-LAST]", help="Profile these steps, as 3-5, into RUN/profiles.")] = None,
    worker: Annotated[list[str] | None, typer.Option(help="What to profile: a worker, model or node; may be repeated.")] = None,
) -> None:
    """Run a recipe, as `python RECIPE.py key=value` does."""
    from rlgraph_cli import recipe as recipes

    if worker and profile is None:
        raise typer.BadParameter("--worker names the workers that --profile profiles; pass both")
    recipes.run(recipe, settings or [], profile, worker or ())


@app.command()
def tune(
    recipe: RecipePath,
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE,VALUE...", help="Values to try, e.g. depth=0,1,2. A key with one value is fixed.")
    ],
    by: Annotated[By, typer.Option(help="What to rank by.")] = By.tokens_per_s,
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Leave out plans whose batches may be more versions behind.")] = None,
    costs: CostsFile = None,
    gpus: Gpus = None,
    gpu: Gpu = None,
    gpus_per_host: GpusPerHost = None,
    cpus: Cpus = None,
    hosts: Hosts = None,
) -> None:
    """Rank combinations of settings by predicted speed. Nothing starts."""
    import rlgraph as rg
    from rlgraph_cli.choices import choices_of
    from rlgraph_cli.recipe import read

    found = read(recipe)
    fixed, choices = choices_of(settings, found.configured)
    cluster = _cluster(found, found.configured(fixed), gpus, gpu, gpus_per_host, cpus, hosts)

    def build(**chosen: str) -> "rg.Graph":
        return found.graph(found.configured([*fixed, *(f"{key}={value}" for key, value in chosen.items())]))

    measured = rg.planning.Costs.from_file(costs) if costs else None
    typer.echo(str(rg.tune(build, cluster, measured, by=by.value, max_staleness=max_staleness, **choices)))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: the newest is exported.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[Dtype, typer.Option(help="The dtype of the written weights.")] = Dtype.bfloat16,
    policy: Annotated[str | None, typer.Option(help="The model to export, if several are trained.")] = None,
    adapter: Annotated[Adapter, typer.Option(help="An adapter merged into its model, or apart as PEFT's folder.")] = Adapter.merged,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder."""
    import rlgraph as rg

    made = rg.runs.export(checkpoint, out, dtype.value, policy, adapter.value)
    typer.echo(f"{made.folder}: after step {made.step}, {made.parameters:,} parameters in {made.dtype}, {made.bytes:,} bytes")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run: finished, killed, or still running.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page (default: RUN/run.html).")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page to this machine until Ctrl-C; it follows the run.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of --watch; 0 chooses a free port.")] = 0,
) -> None:
    """Write the report of a run as one HTML file, or serve it during the run."""
    if watch and out:
        raise typer.BadParameter("--watch serves the page and --out writes it; choose one")
    if port and not watch:
        raise typer.BadParameter("--port is the port of --watch")
    import rlgraph as rg

    if not watch:
        typer.echo(str(rg.report(run, out)))
        return
    with rg.runs.watch(run, port) as view:
        typer.echo(view.url)
        view.wait()


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of recorded runs.")],
    metric: Annotated[list[str] | None, typer.Option(help="A further metric; may be repeated.")] = None,
) -> None:
    """Print runs side by side: step time, reward, staleness, validation, and the settings that differ."""
    import rlgraph as rg

    typer.echo(str(rg.runs.compare(*runs, metrics=metric or [])))


@app.command("from-verl")
def from_verl(
    words: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT.sh|CONFIG.yaml|-- [OVERRIDE]...", help="What starts verl, and overrides that come behind it."),
    ],
    out: OutFile = None,
    skip: Skip = False,
    show_plan: ShowPlan = False,
    run_it: RunIt = False,
    settings: Set = None,
) -> None:
    """Write the recipe that stands for a training of verl, and print what becomes of each of its settings."""
    from rlgraph_cli.from_verl.command import translate

    named = Path(words[0]) if words[0].endswith((".sh", ".yaml", ".yml")) and "=" not in words[0] else None
    _use(lambda: translate(named, words[1:] if named else words, out, skip), show_plan, run_it, settings or [])


@app.command("from-trl")
def from_trl(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A script that makes a GRPOTrainer, SFTTrainer or DPOTrainer.")],
    flags: Annotated[list[str] | None, typer.Argument(metavar="-- [FLAG]...", help="Flags of the script, or further settings.")] = None,
    out: OutFile = None,
    skip: Skip = False,
    show_plan: ShowPlan = False,
    run_it: RunIt = False,
    settings: Set = None,
) -> None:
    """Write the recipe that stands for a script of TRL, and print what becomes of each of its settings. Nothing of the script runs."""
    from rlgraph_cli.from_trl.command import translate

    _use(lambda: translate(script, flags or [], out, skip), show_plan, run_it, settings or [])


def _use(translated: "Callable[[], tuple[Path, str]]", show_plan: bool, run_it: bool, settings: list[str]) -> None:
    """Write a recipe and print the table of its settings, then its plan, and run it, as asked."""
    from rlgraph_cli import recipe as recipes

    if settings and not (show_plan or run_it):
        raise typer.BadParameter("--set is for --plan and --run; a recipe accepts settings as `python RECIPE.py KEY=VALUE`")
    file, table = translated()
    typer.echo(f"{table}\n\n{file}: written; run it with `python {file}`, look at its plan with `rlgraph plan {file}`")
    if show_plan:
        found = recipes.read(file)
        cfg = found.configured(settings)
        typer.echo("\n" + "\n\n".join(map(str, found.plans(cfg, _cluster(found, cfg, None, None, None, None, None), None))))
    if run_it:
        recipes.run(file, settings)


def _cluster(recipe: "Recipe", cfg: Any, gpus: Any, gpu: Any, gpus_per_host: Any, cpus: Any, hosts: Any) -> "rg.Cluster":
    """The cluster that the options describe; without options that of the recipe's `cluster(cfg)`, else what `rg.cluster()` finds."""
    import rlgraph as rg

    given = {"gpus": gpus, "gpu": gpu, "gpus_per_node": gpus_per_host, "cpus": cpus or (8 * gpus if gpus else None), "hosts": hosts}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        from rlgraph.plan.roofline import DEVICES, device_of

        if gpu and device_of(gpu) is None:
            raise typer.BadParameter(f"'{gpu}' is not a known kind of GPU; choose one of {', '.join(DEVICES)}", param_hint="--gpu")
        kind = device_of(gpu) if gpu and gpus else None  # of a kind that is known the memory is too, and a plan that needs more is refused
        return rg.Cluster(**given, gpu_memory_bytes=kind.memory_bytes if kind else None)
    return recipe.cluster_of(cfg) if recipe.cluster_of is not None else rg.cluster()

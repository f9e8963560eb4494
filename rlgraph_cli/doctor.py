"""`rlgraph doctor`: this machine; `rlgraph doctor exact`: a model in engine and trainer, operation by operation."""

from typing import Annotated

import typer

app = typer.Typer(invoke_without_command=True)

Json = Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")]


@app.callback()
def doctor(context: typer.Context, json: Json = False) -> None:
    """Check what this machine can run. The exit code is 1 if there is a problem."""
    if context.invoked_subcommand is not None:
        return
    import rlgraph as rg

    found = rg.runs.doctor()
    typer.echo(found.to_json() if json else str(found))
    raise typer.Exit(1 if found.problems else 0)


@app.command()
def exact(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name that `rg.model_folder` knows.")], json: Json = False
) -> None:
    """Compare engine and trainer with exact=True, operation by operation. The exit code is 1 if one returns other numbers."""
    import rlgraph as rg
    from rlgraph.engines.registry import exactness

    found = exactness().diagnose(rg.model_folder(model))
    typer.echo(found.to_json() if json else str(found))
    raise typer.Exit(0 if found.equal else 1)

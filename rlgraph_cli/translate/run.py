"""Writes what runs: the cluster, the launch with its checkpoints, and the record."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlgraph_cli.translate.page import Page, call

SINKS = {"wandb": "WandB", "tensorboard": "TensorBoard", "mlflow": "MLflow"}


@dataclass(frozen=True)
class Run:
    """Where a run writes, how often it makes checkpoints (0: never) and how many it keeps (0: all), and the sinks of its record."""

    out: str
    every: int | str = 0  # or an expression
    keep: int = 0
    fresh: bool = False
    all_samples: bool = False
    sinks: Sequence[str] = ()  # calls
    loggers: Sequence[str] = ()  # their names


def write_cluster(page: Page, gpus: int, per_host: int, hosts: int = 1) -> None:
    """Write the machines that the script names."""
    page.setting("gpus", gpus, "of all hosts; 0: the machines that there are")
    made = call("rg.Cluster", gpus="cfg.gpus", gpus_per_node=str(per_host), cpus=f"8 * {gpus}", hosts=str(hosts) if hosts > 1 else None)
    page.body += ["", "", "def cluster(cfg: Config) -> rg.Cluster:", f"    return {made} if cfg.gpus else rg.cluster()"]


def write_main(page: Page, run: Run) -> list[str]:
    """Write what runs: the plan, its launch with checkpoints, and the record."""
    page.setting("out", run.out)
    launch = call(
        "plan.launch",
        checkpoint='f"{cfg.out}/checkpoints"' if run.every else None,
        every=str(run.every) if run.every else None,
        keep=str(run.keep) if run.keep and run.every else None,
        fresh="True" if run.fresh and run.every else None,
    )
    if run.sinks:
        page.setting("log", True, "also to " + " and ".join(run.loggers))
    samples, to = "1.0" if run.all_samples else None, "sinks" if run.sinks else None
    return [
        "cfg = rg.config(Config)",
        "plan = rg.compile(graph(cfg), cluster(cfg))",
        "print(plan)",
        *([f"sinks = [{', '.join(run.sinks)}] if cfg.log else []"] if run.sinks else []),
        f"with {launch} as job:",
        f"    list({call('rg.record', 'job', 'steps(cfg)', 'cfg.out', samples=samples, to=to)})",
    ]

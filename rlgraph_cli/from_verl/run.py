"""Reads what runs: the machines of a training, its checkpoints and its record."""

from operator import mul

from rlgraph_cli.from_verl.distillation import distils
from rlgraph_cli.translate.page import Page, call, show
from rlgraph_cli.translate.run import SINKS, Run, write_cluster
from rlgraph_cli.translate.settings import Values


def write_hosts(values: Values, page: Page, *, apart: bool) -> None:
    """Write the machines that the script names, by verl's own rule: pools that fit on one host together share hosts."""
    owners = ["trainer"]
    owners += ["rollout"] if apart and not values["trainer.use_nodes_ratios"] else []
    owners += ["distillation"] if distils(values) else []
    nodes, gpus = ([values.count(f"{owner}.{size}") for owner in owners] for size in ("nnodes", "n_gpus_per_node"))
    together = len(owners) > 1 and sum(gpus) <= 8
    hosts, per_host = (max(nodes), sum(gpus)) if together else (sum(nodes), max(gpus))
    write_cluster(page, sum(map(mul, nodes, gpus)), per_host, hosts)


def run_of(values: Values, name: str) -> Run:
    """Read where a training writes and what it records."""
    folder, project, run = (
        values["trainer.default_local_dir"],
        show(values["trainer.project_name"]),
        show(values["trainer.experiment_name"]),
    )
    loggers = values["trainer.logger"]
    named = [each for each in map(str, loggers if isinstance(loggers, list) else [loggers]) if each in SINKS]
    given = {"wandb": {"project": project, "name": run}, "mlflow": {"experiment": project, "name": run}, "tensorboard": {}}
    return Run(
        folder if isinstance(folder, str) and "${" not in folder else f"runs/{name}",
        every=max(0, values.whole("trainer.save_freq", -1)),
        keep=values.whole("trainer.max_actor_ckpt_to_keep", 0) or values.whole("trainer.max_ckpt_to_keep", 0),
        fresh=values["trainer.resume_mode"] == "disable",
        all_samples=bool(values["trainer.rollout_data_dir"] or values["trainer.validation_data_dir"]),
        sinks=[call(f"rg.runs.sinks.{SINKS[each]}", **given[each]) for each in named] if "trainer.logger" in values.given else (),
        loggers=list(dict.fromkeys(named)),
    )

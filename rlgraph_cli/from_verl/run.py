"""Reads what runs: the machines of a training, its checkpoints and its record."""

from rlgraph_cli.translate.page import Page, call, show
from rlgraph_cli.translate.run import SINKS, Run, write_cluster
from rlgraph_cli.translate.settings import Values


def write_hosts(values: Values, page: Page, *, apart: bool) -> None:
    """Write the machines that the script names, by verl's own rule: pools that fit on one host together share hosts."""
    nodes, each = values.count("trainer.nnodes"), values.count("trainer.n_gpus_per_node")
    gpus, hosts, per_host = nodes * each, nodes, each
    if apart and not values["trainer.use_nodes_ratios"]:
        more, others = values.count("rollout.nnodes"), values.count("rollout.n_gpus_per_node")
        gpus += more * others
        together = each + others <= 8
        hosts, per_host = (max(nodes, more), each + others) if together else (nodes + more, max(each, others))
    write_cluster(page, gpus, per_host, hosts)


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

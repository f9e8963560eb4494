"""Writes what runs: the cluster, the launch with its checkpoints, and the record."""

from rlgraph_cli.from_verl.page import Page, call, show
from rlgraph_cli.from_verl.settings import Values

SINKS = {"wandb": "WandB", "tensorboard": "TensorBoard", "mlflow": "MLflow"}


def write_cluster(values: Values, page: Page, *, apart: bool) -> None:
    """Write the machines that the script names, by verl's own rule: pools that fit on one host together share hosts."""
    nodes, each = values.count("trainer.nnodes"), values.count("trainer.n_gpus_per_node")
    gpus, hosts, per_host = nodes * each, nodes, each
    if apart and not values["trainer.use_nodes_ratios"]:
        more, others = values.count("rollout.nnodes"), values.count("rollout.n_gpus_per_node")
        gpus += more * others
        together = each + others <= 8
        hosts, per_host = (max(nodes, more), each + others) if together else (nodes + more, max(each, others))
    page.setting("gpus", gpus, "of all hosts; 0: this machine as it is")
    made = call("rg.Cluster", gpus="cfg.gpus", gpus_per_node=str(per_host), cpus=f"8 * {gpus}", hosts=str(hosts) if hosts > 1 else None)
    page.body += ["", "", "def cluster(cfg: Config) -> rg.Cluster:", f"    return {made} if cfg.gpus else rg.local_cluster()"]


def write_main(values: Values, page: Page, name: str) -> list[str]:
    """Write what runs: the plan, its launch with checkpoints, and the record."""
    folder = values["trainer.default_local_dir"]
    page.setting("out", folder if isinstance(folder, str) and "${" not in folder else f"runs/{name}")
    every = values.whole("trainer.save_freq", -1)
    kept = values.whole("trainer.max_actor_ckpt_to_keep", 0) or values.whole("trainer.max_ckpt_to_keep", 0)
    launch = call(
        "plan.launch",
        checkpoint='f"{cfg.out}/checkpoints"' if every > 0 else None,
        every=str(every) if every > 0 else None,
        keep=str(kept) if kept and every > 0 else None,
        fresh="True" if values["trainer.resume_mode"] == "disable" and every > 0 else None,
    )
    loggers = values["trainer.logger"]
    named = loggers if isinstance(loggers, list) else [loggers]
    project, run = values["trainer.project_name"], values["trainer.experiment_name"]
    sinks = []
    for logger in named:
        if logger == "wandb":
            sinks.append(call("rg.runs.sinks.WandB", project=show(project), name=show(run)))
        elif logger == "mlflow":
            sinks.append(call("rg.runs.sinks.MLflow", experiment=show(project), name=show(run)))
        elif logger == "tensorboard":
            sinks.append("rg.runs.sinks.TensorBoard()")
    all_samples = values["trainer.rollout_data_dir"] or values["trainer.validation_data_dir"]
    to = None
    if sinks and "trainer.logger" in values.given:
        page.setting("log", True, "also to " + " and ".join(dict.fromkeys(str(logger) for logger in named if logger in SINKS)))
        to = f"[{', '.join(sinks)}] if cfg.log else []"
    recorded = call("rg.record", "job", "steps(cfg)", "cfg.out", samples="1.0" if all_samples else None, to="sinks" if to else None)
    return [
        "cfg = rg.config(Config)",
        "plan = rg.compile(graph(cfg), cluster(cfg))",
        "print(plan)",
        *([f"sinks = {to}"] if to else []),
        f"with {launch} as job:",
        f"    list({recorded})",
    ]

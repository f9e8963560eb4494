"""Writes a supervised fine-tuning."""

from rlgraph_cli.from_verl.models import adapter_of, optimizer_of
from rlgraph_cli.from_verl.run import run_of, write_hosts
from rlgraph_cli.translate.page import Page, call, show
from rlgraph_cli.translate.run import write_main
from rlgraph_cli.translate.settings import Values


def write_fine_tuning(values: Values, page: Page, name: str) -> list[str]:
    """Write a supervised fine-tuning. Returns the lines of its main block."""
    page.setting("model", values["model.path"], "a folder in Hugging Face format, or a hub id")
    files = values.files("data.train_files")
    page.setting("train", files, "parquet files of conversations, separated by commas")
    page.setting("examples", values.count("data.train_batch_size") if "data.train_batch_size" in values.given else 256, "a step")
    page.setting("max_tokens", values.count("data.max_length"), "tokens a conversation")
    page.setting("lr", values.decimal("optim.lr"))
    steps = max(0, values.whole("trainer.total_training_steps", 0))
    if not steps:
        page.setting(
            "epochs", values.count("trainer.total_epochs") if "trainer.total_epochs" in values.given else 4, "passes over the data"
        )
    page.setting("steps", steps, "" if steps else "0: as many as the epochs have")
    page.setting("seed", values.whole("trainer.seed", 0))
    page.setting(
        "micro_batch_tokens",
        max(values.whole("data.max_token_len_per_gpu"), values.count("data.max_length")),
        "no result depends on it",
    )
    trainer = "megatron" if "megatron" in (values["engine"], values["engine.strategy"]) else "fsdp"
    sizes = {
        "tensor_parallel": values.whole("engine.tensor_model_parallel_size", 1),
        "pipeline_parallel": values.whole("engine.pipeline_model_parallel_size", 1),
        "expert_parallel": values.whole("engine.expert_model_parallel_size", 1),
        "context_parallel": max(values.whole("engine.context_parallel_size", 1), values.whole("engine.ulysses_sequence_parallel_size", 1)),
    }
    parallel = {each: page.setting(each, size) for each, size in sizes.items() if size > 1}
    key = values["data.messages_key"]
    page.body += [
        "def rows(cfg: Config) -> rg.data.Rows:",
        f'    return rg.data.parquet(cfg.train.split(","), messages={show(key)})',
        "",
        "",
    ]
    if not steps:
        page.body += ["def steps(cfg: Config) -> int:", "    return cfg.steps or cfg.epochs * (len(rows(cfg)) // cfg.examples)", "", ""]
    page.body += ["def graph(cfg: Config) -> rg.Graph:"]
    policy = {
        "pool": 'rg.Pool("train")',
        "trainer": page.setting("trainer", trainer, "fsdp or megatron"),
        **parallel,
        "optimizer": optimizer_of(values, page, "optim.", values.decimal("optim.clip_grad"), "cfg.lr"),
        "adapter": adapter_of(values, "model."),
        "micro_batch_tokens": "cfg.micro_batch_tokens",
        "recompute": "True" if values["model.enable_gradient_checkpointing"] in (None, True) else None,
    }
    page.body += [f"    policy = {call('rg.Policy', 'cfg.model', **policy)}"]
    page.body += [
        '    batch = rg.examples(rows(cfg), cfg.examples, policy, max_tokens=cfg.max_tokens, overlong="cut", seed=cfg.seed)',
        f"    return rg.Graph({show(name)}, policy.update(batch, loss=rg.SFTLoss()).metrics)",
    ]
    write_hosts(values, page, apart=False)
    return write_main(page, run_of(values, name))

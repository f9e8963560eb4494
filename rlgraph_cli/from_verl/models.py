"""Writes the models of a training: generator, policy, and those that score."""

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.distillation import distils, takes_top_tokens
from rlgraph_cli.from_verl.shape import ACTOR, MODEL, ROLLOUT, Shape, shares_of
from rlgraph_cli.translate.page import Page, call, show, unless
from rlgraph_cli.translate.settings import Values


def write_models(values: Values, page: Page, shape: Shape, model: str, *, critic: bool, reference: bool) -> None:
    """Write the models of a training, and the edge by which weights get from policy to generator."""
    lines, trains, rolls = page.body, "pool", "pool"
    if shape.apart:
        train, roll = shares_of(values)
        lines += [f'    train, rollouts = rg.Pool("train", share={train}), rg.Pool("rollout", share={roll})']
        trains, rolls = "train", "rollouts"
    else:
        share = values.count("trainer.nnodes") * values.count("trainer.n_gpus_per_node")
        lines += [f'    pool = rg.Pool("gpus"{f", share={share}" if distils(values) else ""})']
    lines += [f"    generator = {call('rg.Generator', model, pool=rolls, **generator_options(values, page, shape))}"]
    adapter, balance = adapter_of(values, MODEL), values.decimal(f"{ACTOR}megatron.override_transformer_config.moe_aux_loss_coeff")
    trainer = page.setting("trainer", trainer_of(values), "fsdp or megatron")
    common = {"pool": trains, "trainer": trainer, **declare_parallel(values, page, ACTOR)}
    policy = {
        **common,
        "optimizer": optimizer_of(values, page, f"{ACTOR}optim.", values.decimal(f"{ACTOR}grad_clip"), "cfg.lr"),
        "adapter": adapter,
        "micro_batch_tokens": page.setting("micro_batch_tokens", pass_tokens(values), "tokens of a pass; no result depends on it"),
        "recompute": recompute_of(values),
        "load_balance": show(balance) if balance else None,
        "router_replay": "True" if replays_routes(values) else None,
    }
    lines += [f"    policy = {call('rg.Policy', model, **policy)}"]
    if reference and not adapter:
        lines += [f"    reference = {call('rg.Reference', model, **common, micro_batch_tokens='cfg.micro_batch_tokens')}"]
    if critic:
        path = values["critic.model.path"]
        page.setting("critic", path if path and path != values[f"{MODEL}path"] else "", "the critic's folder; empty: the model's")
        page.setting("critic_lr", values.decimal("critic.optim.lr"))
        optimizer = optimizer_of(values, page, "critic.optim.", values.decimal("critic.grad_clip"), "cfg.critic_lr")
        recompute = "True" if values["critic.model.enable_gradient_checkpointing"] else None
        options = {**common, "optimizer": optimizer, "micro_batch_tokens": "cfg.micro_batch_tokens", "recompute": recompute}
        lines += [f"    critic = {call('rg.Critic', f'cfg.critic or {model}', **options)}"]
    bucket = values.whole(f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes", 0)
    twice = values.has(f"{ROLLOUT}enable_dual_buffer") or (shape.streamed and shape.depth > 0)
    edge = {"depth": "cfg.depth", "buffers": "2" if twice else None, "bucket_bytes": f"{bucket} * 2**20" if bucket else None}
    lines += [f"    weights = {call('rg.feedback', show('weights'), **edge)}"]


def generator_options(values: Values, page: Page, shape: Shape) -> dict[str, str | None]:
    """Write the options of the generator, but for its pool."""
    engine = {"hf": "transformers"}.get(values[f"{ROLLOUT}name"], values[f"{ROLLOUT}name"] or "vllm")
    routes, alone = replays_routes(values), engine == "sglang" or bool(values[f"{MODEL}lora_rank"])
    host = values.whole("rollout.n_gpus_per_node" if shape.apart else "trainer.n_gpus_per_node")
    # An engine lies on one host; where it spans one GPU, there are more of them.
    spans = 1 if routes or alone else min(host, values.count(f"{ROLLOUT}tensor_model_parallel_size"))
    named = ("max_num_batched_tokens", "enforce_eager")
    arguments = {key: values[f"{ROLLOUT}{key}"] for key in named if engine == "vllm" and values.has(f"{ROLLOUT}{key}")}
    context, width = values.whole(f"{ROLLOUT}max_model_len", 0), values.whole(f"{ROLLOUT}max_num_seqs", 0)
    longest = "cfg.max_prompt_tokens + cfg.max_tokens"
    memory = values.decimal(f"{ROLLOUT}gpu_memory_utilization")
    return {
        "sampling": sampling_of(values),
        "engine": page.setting("engine", engine, "vllm, sglang or transformers"),
        "tensor_parallel": page.setting("rollout_tensor_parallel", spans, "GPUs an engine spans") if spans > 1 else None,
        "max_context": f"max({context}, {longest})" if context else longest,
        "memory": page.setting("memory", memory, "the engine's share of a GPU", none=True),
        "max_sequences": str(width) if width else None,
        "weights_dtype": show("fp8") if values.has(f"{ROLLOUT}quantization") else None,
        "routes": "True" if routes else None,
        "engine_args": f"{show(arguments)} if cfg.engine == {show('vllm')} else {{}}" if arguments else None,
        "seed": "cfg.seed",
    }


def sampling_of(values: Values) -> str:
    """Write how the rollout samples."""
    top_k, top_p = values.whole(f"{ROLLOUT}top_k"), values.decimal(f"{ROLLOUT}top_p")
    temperature = values.decimal(f"{ROLLOUT}temperature")
    return call(
        "rg.Sampling",
        max_tokens="cfg.max_tokens",
        temperature=unless(1, temperature),
        top_p=unless(1, top_p),
        top_k=str(top_k) if top_k > 0 else None,
        ignore_eos="True" if values.has(f"{ROLLOUT}ignore_eos") else None,
    )


def declare_parallel(values: Values, page: Page, whose: str) -> dict[str, str | None]:
    """Declare how a trainer shares its model among GPUs."""
    sizes = {"context_parallel": values.whole(f"{whose}ulysses_sequence_parallel_size", 1)}
    if trainer_of(values) == "megatron":
        sizes = {
            "tensor_parallel": values.whole(f"{whose}megatron.tensor_model_parallel_size", 1),
            "pipeline_parallel": values.whole(f"{whose}megatron.pipeline_model_parallel_size", 1),
            "expert_parallel": values.whole(f"{whose}megatron.expert_model_parallel_size", 1),
            "context_parallel": values.whole(f"{whose}megatron.context_parallel_size", 1),
        }
    return {name: page.setting(name, size, "GPUs of the trainer that share a model") for name, size in sizes.items() if size > 1}


def trainer_of(values: Values) -> str:
    """Choose the trainer: with Megatron-Core there are no shared adapters, no replayed routes and no losses of several tokens."""
    if values[f"{MODEL}lora_rank"] or replays_routes(values) or takes_top_tokens(values):
        return "fsdp"
    named = [values["model_engine"], values[f"{ACTOR}strategy"]]
    return "megatron" if "megatron" in named or values["megatron"] else "fsdp"


def replays_routes(values: Values) -> bool:
    return values.has(f"{ROLLOUT}enable_rollout_routing_replay") and values[f"{ACTOR}megatron.router_replay.mode"] == "R3"


def pass_tokens(values: Values) -> int:
    longest = values.count("data.max_prompt_length") + values.count("data.max_response_length")
    rows = values.whole(f"{ACTOR}ppo_micro_batch_size_per_gpu", 0)
    if values[f"{ACTOR}use_dynamic_bsz"] or not rows:
        return max(longest, values.whole(f"{ACTOR}ppo_max_token_len_per_gpu"))
    return longest * rows


def recompute_of(values: Values) -> str | None:
    key = f"{ACTOR}megatron.override_transformer_config.recompute_granularity"
    if trainer_of(values) == "megatron":
        return {"full": "True", "selective": '"selective"'}.get(values.text(key))
    return "True" if values[f"{MODEL}enable_gradient_checkpointing"] else None


def adapter_of(values: Values, prefix: str) -> str | None:
    """Write the adapter, if there is one."""
    rank, folder = values.whole(f"{prefix}lora_rank", 0), values[f"{prefix}lora_adapter_path"] if prefix == MODEL else None
    if not rank:
        return None
    targets = values[f"{prefix}target_modules"] or "all-linear"
    named = targets if isinstance(targets, list) else None
    alpha = values.decimal(f"{prefix}lora_alpha") or 16.0
    return call(
        "rg.LoRA",
        rank=str(rank),
        alpha=show(alpha),
        targets=show(named) if named else None,
        folder=show(folder) if folder else None,
    )


def optimizer_of(values: Values, page: Page, prefix: str, clip: float, lr: str) -> str:
    """Write AdamW with its schedule; verl counts the steps of a schedule by batches, rlgraph by optimizer steps."""
    betas = values[f"{prefix}betas"] if prefix != "critic.optim." else None
    if betas is not None and (not isinstance(betas, list) or [type(each) for each in betas] != [float, float]):
        raise ConfigError(f"from-verl: {prefix}betas={betas} must be a pair of numbers")
    decay = values.decimal(f"{prefix}weight_decay")
    warm = values.whole(f"{prefix}lr_warmup_steps", -1)
    share = values.decimal(f"{prefix}lr_warmup_steps_ratio") if prefix != "critic.optim." else 0.0
    epochs = values.count("critic.ppo_epochs" if prefix == "critic.optim." else f"{ACTOR}ppo_epochs")
    batches = f" * cfg.mini_batches{f' * {epochs}' if epochs > 1 else ''}" if "mini_batches" in page.fields else ""
    steps = f"{warm}{batches}" if warm > 0 else (f"int({share} * steps(cfg)){batches}" if share else None)
    kind = "constant"
    schedule = None
    if prefix != "critic.optim.":
        kind = values[f"{prefix}lr_scheduler_type"] or values[f"{prefix}lr_decay_style"] or "constant"
        over, final = values.whole(f"{prefix}lr_decay_steps", 0) if prefix != "optim." else 0, values.decimal(f"{prefix}min_lr_ratio")
        if (lowest := values.decimal(f"{prefix}min_lr")) and (highest := values.decimal(f"{prefix}lr")):
            final = lowest / highest
        if kind in ("cosine", "linear"):
            length = f"{over}{batches}" if over else f"steps(cfg){batches}"
            schedule = call(
                f"rg.optim.{kind.capitalize()}", warmup_steps=steps, steps=length, final=show(round(final, 6)) if final else None
            )
            steps = None
    return call(
        "rg.AdamW",
        lr=lr,
        betas=show(betas) if betas and list(betas) != [0.9, 0.999] else None,
        weight_decay=show(decay) if decay else None,
        grad_clip=show(clip) if clip and clip != 1 else None,
        warmup_steps=steps,
        schedule=schedule,
    )

"""Writes the recipe that stands for a training of TRL, as a person would have written it."""

import ast
import math
from typing import Any

from rlgraph_cli.from_trl.copies import copy
from rlgraph_cli.from_trl.data import Data
from rlgraph_cli.from_trl.rewards import write_score
from rlgraph_cli.from_trl.script import Script
from rlgraph_cli.translate.page import Page, assemble, call, show, unless
from rlgraph_cli.translate.run import SINKS, Run, write_cluster, write_main
from rlgraph_cli.translate.settings import Values

AGGREGATIONS = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
PAIR_LOSSES = {"sigmoid": "rg.DPO", "ipo": "rg.losses.IPO"}


def write_recipe(script: Script, values: Values, name: str) -> str:
    """Write the recipe of a script, whose graph is called `name`. Raises ConfigError for values that TRL itself would refuse."""
    page = Page()
    page.setting("model", values.text("model"), "a folder in Hugging Face format, or a hub id")
    if values.has("peft_config.folder"):
        page.setting("adapter", values.text("peft_config.folder"), "a folder of PEFT's; Config.model is its base_model_name_or_path")
    if script.train is None or script.train.rows is None:
        data = script.train or Data()
        page.setting(
            "train", data.files, f"{data.taken} of the hub's data set: write it to a file" if data.taken else "parquet or JSON lines"
        )
    body = _write_grpo(script, values, page) if script.kind == "GRPO" else _write_supervised(script, values, page)
    page.setting("seed", values.whole("data_seed", values.whole("seed")))
    page.body += ["def graph(cfg: Config) -> rg.Graph:", *(f"    {line}" for line in body), f"    return rg.Graph({show(name)}, *outputs)"]
    processes = values.count("num_processes")
    gpus = processes + (values.count("vllm_tensor_parallel_size") if _apart(values) else 0)
    write_cluster(page, gpus, min(gpus, 8))
    main = write_main(page, _run(values, name, "prompts" if script.kind == "GRPO" else "examples"))
    return assemble(page, main, name, str(script.path), "TRL")


def _rows(page: Page) -> str:
    return "rows(cfg, cfg.train)" if "train" in page.fields else 'rows(cfg, "")'


def _rows_of_step(values: Values) -> int:
    return values.count("per_device_train_batch_size") * values.count("gradient_accumulation_steps") * values.count("num_processes")


def _per_generation(values: Values) -> int:
    """Count the steps of accumulation whose completions one rollout writes."""
    window = values.count("per_device_train_batch_size") * values.count("num_processes")
    rollout = values.whole("generation_batch_size", 0) // window
    return values.whole("steps_per_generation", 0) or rollout or values.count("gradient_accumulation_steps")


def _updates(values: Values) -> int:
    """Count the optimizer steps of a step of the graph, by which TRL counts everything."""
    return max(1, _per_generation(values) // values.count("gradient_accumulation_steps")) * values.whole("num_iterations", 1)


def _apart(values: Values) -> bool:
    return bool(values["use_vllm"]) and values["vllm_mode"] == "server"


def _write_data(script: Script, page: Page, count: str, conversations: bool) -> None:
    """Write how rows are read, and the functions of the script that make them."""
    data = script.train or Data()
    functions = [each.said for each in script.rewards if each.said is not None]
    imports, defined = copy(script.path.read_text(encoding="utf-8"), script.source, [*data.reads, *functions])
    page.imports += imports
    for text in defined:
        page.body += [*text.split("\n"), "", ""]
    if data.rows is not None:
        read = "[dict(zip(data, row)) for row in zip(*data.values())]" if data.columns else "data"
        lines = [f"    data = {ast.unparse(data.rows)}", f"    return rg.data.rows({read}){''.join(data.steps)}"]
    else:
        read = f'read(files.split(",")){"".join(data.steps)}'
        lines = [
            '    read = rg.data.parquet if files.endswith(".parquet") else rg.data.jsonl',
            f"    return {f'rg.data.conversational({read})' if conversations else read}",
        ]
    page.body += ["def rows(cfg: Config, files: str) -> rg.data.Rows:", *lines, "", ""]
    if data.most:
        lines = [*lines[:-1], lines[-1].replace("    return ", "    made = ", 1), f"    return rg.data.rows([*made][:{data.most}])"]
    if "epochs" in page.fields:
        page.body += [
            "def steps(cfg: Config) -> int:",
            f"    return cfg.steps or max(1, int(cfg.epochs * len({_rows(page)}) / cfg.{count}))",
            "",
            "",
        ]


def _declare_steps(values: Values, page: Page) -> None:
    """Declare how long the training is: optimizer steps of TRL over those of a step of the graph, or passes over the data."""
    most = values.whole("max_steps", -1)
    if most > 0:
        page.setting("steps", math.ceil(most / _updates(values)))
        return
    page.setting("epochs", values.decimal("num_train_epochs"), "passes over the data")
    page.setting("steps", 0, "0: as many as the epochs have")


def _optimizer(values: Values, updates: str) -> str:
    """Write AdamW with its schedule, which both libraries count by optimizer steps."""
    kind, warm = values["lr_scheduler_type"], values.decimal("warmup_steps")
    length = f"steps(cfg){updates}"
    warmup = f"int({warm} * {length})" if 0 < warm < 1 else str(int(warm)) if warm else None
    options = values["lr_scheduler_kwargs"] or {}
    numbers = isinstance(options, dict) and all(isinstance(each, int | float) for each in options.values())
    if not numbers or not options.keys() <= {"min_lr", "min_lr_rate"}:
        raise values.error("lr_scheduler_kwargs", "has no counterpart except for the numbers min_lr and min_lr_rate; see rg.optim")
    lowest = options.get("min_lr_rate") or options.get("min_lr", 0.0) / (values.decimal("learning_rate") or 1.0)
    schedule = None
    if not kind.startswith("constant"):
        function = f"rg.optim.{kind.partition('_')[0].capitalize()}"
        schedule = call(function, warmup_steps=warmup, steps=length, final=unless(0.0, round(lowest, 9)))
    betas = (values.decimal("adam_beta1"), values.decimal("adam_beta2"))
    return call(
        "rg.AdamW",
        lr="cfg.lr",
        betas=unless((0.9, 0.999), betas),
        eps=unless(1e-8, values.decimal("adam_epsilon")),
        weight_decay=unless(0.0, values.decimal("weight_decay")),
        grad_clip=unless(1.0, values.decimal("max_grad_norm")),
        warmup_steps=warmup if kind == "constant_with_warmup" else None,
        schedule=schedule,
        moments=show("8bit") if "8bit" in values["optim"] else None,
    )


def _adapter(values: Values) -> str | None:
    """Write the adapter, if there is one: PEFT's defaults, or those of TRL's flags."""
    quantised = show("nf4") if values.has("load_in_4bit") else None
    if values.has("peft_config.folder"):
        return call("rg.LoRA.load", "cfg.adapter")
    flags = values.has("use_peft")
    if not (values.has("peft_config") or flags):
        return None
    targets = values["peft_config.target_modules"] or ["q_proj", "v_proj"]  # which PEFT chooses for most families
    if not isinstance(targets, str | list) or not all(isinstance(each, str) for each in targets):
        raise values.error("peft_config.target_modules", "is not a list of names")
    return call(
        "rg.LoRA",
        rank=str(values.whole("peft_config.r", 16 if flags else 8)),
        alpha=show(values.decimal("peft_config.lora_alpha") or (32.0 if flags else 8.0)),
        targets=unless("all-linear", targets if targets == "all-linear" or isinstance(targets, list) else [targets]),
        base=quantised,
    )


def _write_policy(values: Values, model: str, pool: str, updates: str) -> tuple[list[str], bool]:
    """Write the policy; return its lines, and whether it has an adapter."""
    adapter = _adapter(values)
    recompute = "True" if values["gradient_checkpointing"] else None
    made = call("rg.Policy", model, pool=pool, optimizer=_optimizer(values, updates), adapter=adapter, recompute=recompute)
    return [f"policy = {made}"], adapter is not None


def _write_supervised(script: Script, values: Values, page: Page) -> list[str]:
    """Write a fine-tuning or a training on pairs; return the lines of its graph."""
    pairs = script.kind == "DPO"
    page.setting("examples", _rows_of_step(values), "pairs a step" if pairs else "rows a step")
    if longest := values.whole("max_length", 0):
        page.setting("max_tokens", longest, "of a row; longer ones are cut")
    page.setting("lr", values.decimal("learning_rate"))
    _declare_steps(values, page)
    if not pairs and (text := values["dataset_text_field"]) != "text" and script.train:
        script.train.steps.append(f'.map(lambda row: row | {{"text": row[{show(text)}]}})')
    _write_data(script, page, "examples", conversations=False)
    model, template = "cfg.model", values["chat_template_path"]
    lines = ['pool = rg.Pool("train")']
    if template and not str(template).endswith((".jinja", ".j2")):
        raise values.error("chat_template_path", "adds tokens of another model; pass a Jinja file, *.jinja")
    if template:
        model = "model"
        lines += [f"model = rg.model_folder(cfg.model, chat_template={page.setting('chat_template', str(template), 'a file of Jinja')})"]
    policy, adapter = _write_policy(values, model, "pool", "")
    limits = {"max_tokens": "cfg.max_tokens", "overlong": '"cut"'} if "max_tokens" in page.fields else {}
    batch = call("rg.pairs" if pairs else "rg.examples", _rows(page), "cfg.examples", "policy", **limits, seed="cfg.seed")
    lines += [*policy, f"batch = {batch}"]
    kinds = values["loss_type"]
    if not pairs:
        return [*lines, f"outputs = [policy.update(batch, loss=rg.SFTLoss({'dft=True' if kinds == 'dft' else ''})).metrics]"]
    loss = call(PAIR_LOSSES[kinds[0] if isinstance(kinds, list) else kinds], beta=page.setting("beta", values.decimal("beta")))
    reference = show(values.text("ref_model")) if values.has("ref_model") else "cfg.model"
    ref = "policy.base_log_probs(batch)" if adapter else f"rg.Reference({reference}, pool=pool).log_probs(batch)"
    return [*lines, f"outputs = [policy.update(batch, {ref}, loss={loss}).metrics]"]


def _write_grpo(script: Script, values: Values, page: Page) -> list[str]:
    """Write GRPO; return the lines of its graph."""
    accumulated, processes = values.count("gradient_accumulation_steps"), values.count("num_processes")
    window = values.count("per_device_train_batch_size") * processes
    per_generation = _per_generation(values)
    group, completions = values.count("num_generations"), window * per_generation
    if completions % group:
        rule = f"does not divide the {completions} completions of a rollout: per_device_train_batch_size times steps_per_generation times"
        raise values.error("num_generations", f"{rule} num_processes, as TRL requires; pass -- --num_processes N, or more steps")
    if per_generation % accumulated:
        raise values.error("steps_per_generation", f"must be a multiple of gradient_accumulation_steps={accumulated}, as TRL requires")
    if not script.rewards:
        raise values.error("reward_funcs", "is not a reward; name a function of the script, or pass -- --reward_funcs accuracy_reward")
    epochs = values.count("num_iterations")
    page.setting("prompts", completions // group, "prompts a step")
    page.setting("group_size", group, "responses a prompt")
    page.setting("max_tokens", values.count("max_completion_length"), "tokens a response")
    page.setting("mini_batches", per_generation // accumulated, "optimizer steps a step")
    page.setting("lr", values.decimal("learning_rate"))
    page.setting("depth", 0, "staleness bound in weight versions; 0 is on-policy, as TRL")
    _declare_steps(values, page)
    page.setting("engine", "vllm" if values["use_vllm"] else "transformers", "vllm, sglang or transformers")
    _write_data(script, page, "prompts", conversations=True)
    models = [each.model for each in script.rewards if each.model]
    weights = values["reward_weights"]
    if weights and not (isinstance(weights, list) and [*map(type, weights)] == [float] * len(script.rewards)):
        raise values.error("reward_weights", f"must be {len(script.rewards)} numbers such as 0.5, one per reward")
    if not models:
        while page.body and not page.body[-1]:
            page.body.pop()
        write_score(page, script.rewards, weights)
    lines, kl = _write_models(values, page, f" * cfg.mini_batches{f' * {epochs}' if epochs > 1 else ''}")
    chat = values["chat_template_kwargs"]
    if chat and not isinstance(chat, dict):
        raise values.error("chat_template_kwargs", "is not a mapping")
    options = f"rg.options.Chat(template_kwargs={show(chat)})" if chat else None
    lines += [f"prompts = {call('rg.prompts', _rows(page), count='cfg.prompts', chat=options, seed='cfg.seed')}"]
    lines += ["rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)"]
    if models:
        page.setting("reward_model", models[0], "a model for sequence classification")
        pool = "train" if _apart(values) else "pool"
        lines += [f"rewards = rg.RewardModel(cfg.reward_model, pool={pool}).rewards(prompts, rollout)"]
    else:
        lines += ["rewards = rg.reward(score, prompts, rollout)"]
    scale = values["scale_rewards"] in (True, "group")
    lines += [f"advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO({'' if scale else 'normalize_std=False'}))"]
    lines += ["old = policy.log_probs(rollout)"]
    inputs = ["rollout", "old", "advantages"]
    if values["use_vllm"] and values["vllm_importance_sampling_correction"]:
        lines += [f"correction = rg.stages.rollout_correction(rollout, old, weights={_correction(values)})"]
        inputs += ["correction"]
    if values["mask_truncated_completions"]:
        lines += ["whole = rg.stages.filter_truncated(rollout)"]
        inputs += ["whole"]
    if kl:
        lines += [f"ref = {kl}"]
        inputs += ["ref"]
    update = {"loss": _loss(values, page), "mini_batches": "cfg.mini_batches", "epochs": unless(1, epochs)}
    lines += [f"step = {call('policy.update', *inputs, **update)}", "outputs = [step.metrics]"]
    return [*lines, *_evaluation(script, values, page, options, scored=not models), "weights.close(step.weights)"]


def _write_models(values: Values, page: Page, updates: str) -> tuple[list[str], str]:
    """Write generator and policy; return their lines, and what computes the reference's log-probs."""
    apart, vllm = _apart(values), bool(values["use_vllm"])
    train, roll = ("train", "rollouts") if apart else ("pool", "pool")
    spans = values.count("vllm_tensor_parallel_size")
    pools = [f'train, rollouts = rg.Pool("train", share={values.count("num_processes")}), rg.Pool("rollout", share={spans})']
    top_p, top_k = values.decimal("top_p"), values.whole("top_k", 0)
    sampling = call(
        "rg.Sampling",
        max_tokens="cfg.max_tokens",
        temperature=unless(1.0, values.decimal("temperature")),
        top_p=unless(1.0, top_p),
        top_k=unless(0, max(0, top_k)),
        min_p=unless(0.0, values.decimal("min_p")),
        stop=unless((), _stop(values)),
    )
    memory = values.decimal("vllm_gpu_memory_utilization")
    context = values.whole("vllm_max_model_length", 0)
    options = {
        "sampling": sampling,
        "engine": "cfg.engine",
        "tensor_parallel": page.setting("rollout_tensor_parallel", spans, "GPUs an engine spans") if spans > 1 and vllm else None,
        "max_context": page.setting("max_context", context, "tokens of prompt and response") if context and vllm else None,
        "memory": page.setting("memory", memory, "the engine's share of a GPU", none=True) if vllm and not apart else None,
        "seed": "cfg.seed",
    }
    policy, adapter = _write_policy(values, "cfg.model", train, updates)
    lines = pools if apart else ['pool = rg.Pool("gpus")']
    lines += [f"generator = {call('rg.Generator', 'cfg.model', pool=roll, **options)}", *policy]
    lines += ['weights = rg.feedback("weights", depth=cfg.depth)']
    if not values.decimal("beta"):
        return lines, ""
    return lines, "policy.base_log_probs(rollout)" if adapter else f"rg.Reference(cfg.model, pool={train}).log_probs(rollout)"


def _stop(values: Values) -> tuple[str, ...]:
    """Read the texts at which responses stop, by vLLM's name or by that of transformers."""
    given = values["generation_kwargs"] or {"stop": []}
    known = isinstance(given, dict) and len(given) == 1 and given.keys() <= {"stop", "stop_strings"}
    texts = next(iter(given.values())) if known else None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise values.error("generation_kwargs", "has no counterpart except for the texts of stop or stop_strings; leave the rest out")
    return tuple(texts)


def _correction(values: Values) -> str:
    """Write the weights that correct the engine's log-probs; TRL has no lower bound unless one is given."""
    level, _, kind = values["vllm_importance_sampling_mode"].partition("_")
    high, low = values.decimal("vllm_importance_sampling_clip_max"), values.decimal("vllm_importance_sampling_clip_min")
    upper = show(high or 1e9)
    if kind == "mask":
        return call("rg.estimators.IcePop", level=show(level), low=show(low or 1e-9), high=upper)
    if low:
        raise values.error("vllm_importance_sampling_clip_min", f"has no counterpart with {level}_truncate; choose {level}_mask")
    return call("rg.estimators.TruncatedIS", threshold=upper, level=show(level))


def _loss(values: Values, page: Page) -> str:
    """Write the loss with its aggregation."""
    kind, beta = values["loss_type"], values.decimal("beta")
    low, high = values.decimal("epsilon"), values.decimal("epsilon_high") or values.decimal("epsilon")
    options: dict[str, Any] = {"aggregation": unless("token-mean", AGGREGATIONS.get(kind, "token-mean"))}
    options["horizon"] = "cfg.max_tokens" if kind == "dr_grpo" else None
    options["entropy_coef"] = unless(0.0, values.decimal("entropy_coef"))
    options["kl_coef"] = page.setting("kl_coef", beta, "of the KL to the reference in the loss") if beta else None
    delta = None if values["delta"] is None else values.decimal("delta")
    if kind == "sapo":
        options["aggregation"] = None
        return call(
            "rg.losses.SAPO",
            tau_pos=show(values.decimal("sapo_temperature_pos")),
            tau_neg=show(values.decimal("sapo_temperature_neg")),
            **options,
        )
    if kind == "cispo":
        if high < 1:
            raise values.error("epsilon_high", "is the largest ratio of loss_type=cispo; choose a number above 1, e.g. 5.0")
        return call("rg.losses.CISPO", clip_low="1.0", clip_high=page.setting("clip_high", high - 1), **options)
    clips = {"clip_low": page.setting("clip_low", low), "clip_high": page.setting("clip_high", high)}
    if values["importance_sampling_level"] == "sequence":
        options["aggregation"] = unless("seq-mean-token-mean", AGGREGATIONS.get(kind, "token-mean"))
        if delta is not None:
            raise values.error("delta", "has no counterpart with importance_sampling_level=sequence; leave one out")
        return call("rg.losses.GSPO", **clips, **options)
    return call("rg.ClippedLoss", **clips, clip_c=show(delta), **options)


def _evaluation(script: Script, values: Values, page: Page, chat: str | None, *, scored: bool) -> list[str]:
    """Write the evaluation, if the script has one and a function scores."""
    held, every = script.evaluation, values.whole("eval_steps", 0) or values.whole("logging_steps")
    if values["eval_strategy"] in ("no", False) or held is None or not held.files or not scored:
        return []
    page.setting("validation", held.files, f"{held.taken or 'a file of its own'}; empty for no evaluation")
    samples = values.whole("num_generations_eval", values.count("num_generations"))
    options = {
        "reward": "score",
        "every": page.setting("evaluate_every", max(1, every // _updates(values))),
        "samples": page.setting("samples", samples, "answers to each question held out"),
        "at_start": "True" if values["eval_on_start"] else None,
        "chat": chat,
    }
    made = call("rg.evaluate", "generator", "rows(cfg, cfg.validation)", "weights", **options)
    return ["if cfg.validation:", f"    outputs.append({made})"]


def _run(values: Values, name: str, count: str) -> Run:
    """Read where the training writes and what it records."""
    loggers = values["report_to"]
    named = [each for each in map(str, loggers if isinstance(loggers, list) else [loggers]) if each in SINKS]
    project, run = show(values.text("project")), show(values.text("run_name")) if values.has("run_name") else None
    given = {"wandb": {"project": project, "name": run}, "mlflow": {"experiment": project, "name": run}, "tensorboard": {}}
    every: int | str = {"no": 0, "steps": max(1, values.whole("save_steps") // _updates(values))}.get(
        values["save_strategy"], f"max(1, len(rows(cfg, cfg.train)) // cfg.{count})"
    )
    sinks = [call(f"rg.runs.sinks.{SINKS[each]}", **given[each]) for each in named]
    return Run(
        values.text("output_dir") or f"runs/{name}", every=every, keep=values.whole("save_total_limit", 0), sinks=sinks, loggers=named
    )

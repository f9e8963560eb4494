"""Writes the recipe that stands for a training of verl, as a person would have written it."""

import keyword
import re

from rlgraph_cli.from_verl.fine_tuning import write_fine_tuning
from rlgraph_cli.from_verl.losses import KL, correction_of, critic_update_of, estimator_of, loss_of
from rlgraph_cli.from_verl.models import write_models
from rlgraph_cli.from_verl.page import Page, assemble, call, show
from rlgraph_cli.from_verl.run import write_cluster, write_main
from rlgraph_cli.from_verl.script import Call
from rlgraph_cli.from_verl.settings import Values
from rlgraph_cli.from_verl.shape import ACTOR, MODEL, ROLLOUT, Shape, shape_of

OVER_TOKENS = ("optimal_token_baseline", "tir_optimal_token_baseline")


def write_recipe(started: Call, values: Values, name: str) -> str:
    """Write the recipe of a call, whose graph is called `name`. Raises ConfigError for values that verl itself would refuse."""
    page = Page()
    write = write_fine_tuning if "sft" in started.module else write_training
    return assemble(page, write(started, values, page, name), name, started.source)


def write_training(started: Call, values: Values, page: Page, name: str) -> list[str]:
    """Write a training by reinforcement learning: Config, graph, cluster. Returns the lines of its main block."""
    shape = shape_of(started, values)
    lines = page.body
    declare_settings(values, page, shape)
    estimator = values["algorithm.adv_estimator"]
    critic = estimator == "gae"
    kl_loss = bool(values[f"{ACTOR}use_kl_loss"]) and bool(values.decimal(f"{ACTOR}kl_loss_coef"))
    reference = kl_loss or bool(values["algorithm.use_kl_in_reward"])
    penalised = values.has("reward.reward_kwargs.overlong_buffer_cfg.enable")
    refilled = values.has("algorithm.filter_groups.enable")

    lines += ["def graph(cfg: Config) -> rg.Graph:"]
    model = "cfg.model"
    changed = {name: value for name, value in values.below(f"{MODEL}override_config.").items() if value or "drop" not in name}
    if changed:  # layers have no dropout in training
        lines += [f"    model = rg.model_folder(cfg.model, config={show(changed)})"]
        model = "model"
    write_models(values, page, shape, model, critic, reference)
    data = write_data(values, page)
    lines += [""]
    chat = values.below("data.apply_chat_template_kwargs.")
    options = f"rg.options.Chat(template_kwargs={show(chat)})" if chat else None
    if options:
        lines += [f"    chat = {options}"]
    prompts = call("rg.prompts", data, count="cfg.prompts", chat="chat" if options else None, seed="cfg.seed")
    lines += [f"    prompts = {prompts}"]
    scorer = scorer_of(values, page)
    lines += [f"    score = {scorer}"] if scorer else []
    refill = None
    if refilled:
        rounds = values.whole("algorithm.filter_groups.max_num_gen_batches")
        values["data.gen_batch_size"]
        refill = call(
            "rg.options.Refill", reward="score", writes='"accuracy"' if penalised else None, rounds=str(rounds) if rounds > 0 else None
        )
    streamed = shape.streamed and shape.depth > 0 and bool(values["async_training.partial_rollout"])
    rollout = call(
        "generator.rollout",
        "prompts",
        "weights",
        group_size="cfg.group_size",
        interrupt='"keep"' if streamed else None,
        continuous="True" if streamed else None,
        refill=refill,
    )
    lines += [f"    rollout = {rollout}"]
    rewards = write_rewards(values, page, scorer, penalised, refilled)
    given, old_given = ["rollout", rewards], []
    sums = estimator in OVER_TOKENS
    if not shape.bypass or sums:
        lines += [f"    old = policy.log_probs(rollout{', sum_pi_squared=True' if sums else ''})"]
        old_given = ["old"] if not shape.bypass else []
        given += ["old"] if sums else []
    ref = "ref" if reference else ""
    if reference:
        made = "policy.base_log_probs(rollout)" if values.has(f"{MODEL}lora_rank") else "reference.log_probs(rollout)"
        lines += [f"    ref = {made}"]
    if values["algorithm.use_kl_in_reward"]:
        kind = KL.get(values["algorithm.kl_penalty"], values["algorithm.kl_penalty"])
        coef = page.setting(
            "kl_coef",
            values.decimal("algorithm.kl_ctrl.kl_coef"),
            "of the KL to the reference that rewards lose",
        )
        if values["algorithm.kl_ctrl.type"] == "adaptive":
            target, horizon = values["algorithm.kl_ctrl.target_kl"], values["algorithm.kl_ctrl.horizon"]
            coef = f"rg.estimators.AdaptiveKL({coef}, target={target}, horizon={horizon})"
        held = "old" if old_given else "rollout"
        inputs = ["rollout", given[1], *(["old"] if held == "old" else []), ref]
        lines += [
            "    " + f"shaped = {call('rg.stages.kl_shaped_rewards', *inputs, coef=coef, estimator=show(kind) if kind != 'k1' else None)}"
        ]
        given[1] = "shaped"
    corrected = correction_of(values, page, shape)
    if corrected and not shape.bypass:
        lines += [f"    correction = {call('rg.stages.rollout_correction', 'rollout', 'old', **corrected)}"]
        old_given += ["correction"]
        given += ["correction"] if "rejections" in corrected else []
    if critic:
        lines += ["    values = critic.values(rollout)"]
        given += ["values"]
    if estimator == "remax":
        lines += [
            "    best = rg.Sampling(max_tokens=cfg.max_tokens, temperature=0)",
            '    greedy = generator.rollout(prompts, weights, sampling=best, name="greedy")',
            '    baseline = rg.reward(score, prompts, greedy, writes="baseline_rewards", name="baseline")',
        ]
        given += ["baseline"]
    lines += [f"    advantages = {call('rg.advantages', *given, estimator=estimator_of(values))}"]
    loss = loss_of(values, page, shape, corrected)
    lines += [f"    loss = {loss}"]
    inputs = ["rollout", *old_given, "advantages", *(["ref"] if kl_loss else [])]
    update_epochs = values.whole(f"{ACTOR}ppo_epochs")
    warmup = values.whole("trainer.critic_warmup")
    update = call(
        "policy.update",
        *inputs,
        loss="loss",
        epochs=str(update_epochs) if update_epochs > 1 else None,
        mini_batches="cfg.mini_batches",
        critic_warmup=str(warmup) if critic and warmup else None,
    )
    lines += [f"    step = {update}"]
    outputs = ["step.metrics"]
    if critic:
        lines += [f"    critic_step = {critic_update_of(values, shape)}"]
        outputs += ["critic_step.metrics"]
    lines += [f"    outputs = [{', '.join(outputs)}]"]
    write_evaluation(values, page, shape, bool(scorer), bool(options))
    lines += ["    weights.close(step.weights)", f"    return rg.Graph({show(name)}, *outputs)"]
    write_cluster(values, page, shape)
    return write_main(values, page, name)


def declare_settings(values: Values, page: Page, shape: Shape) -> None:
    """Declare what a run is about."""
    page.setting("model", values[f"{MODEL}path"], "a folder in Hugging Face format, or a hub id")
    files = values["data.train_files"]
    page.setting("train", files if isinstance(files, str) else ",".join(map(str, files)), "files of verl's schema, separated by commas")
    page.setting("prompts", shape.prompts, "prompts a step")
    page.setting("group_size", values.whole(f"{ROLLOUT}n"), "responses a prompt")
    page.setting("max_prompt_tokens", values.whole("data.max_prompt_length"))
    page.setting("max_tokens", values.whole("data.max_response_length"), "tokens a response")
    page.setting("mini_batches", shape.mini_batches, "optimizer steps a step")
    page.setting("lr", values.decimal(f"{ACTOR}optim.lr"))
    page.setting("depth", shape.depth, "staleness bound in weight versions; 0 is on-policy")
    steps = max(0, values.whole("trainer.total_training_steps", 0))
    if shape.streamed and values["rollout.total_rollout_steps"]:
        steps = max(1, values.whole("rollout.total_rollout_steps") // shape.prompts)
    if steps:
        page.setting("steps", steps)
    else:
        page.setting("epochs", values.whole("trainer.total_epochs"), "passes over the data")
        page.setting("steps", 0, "0: as many as the epochs have")
    page.setting("seed", values.whole("data.seed", 0))


def overlong_of(values: Values) -> str:
    """Choose what becomes of prompts that are too long."""
    if values["data.filter_overlong_prompts"]:
        return '"drop"'
    return '"truncate_left"' if values["data.truncation"] in ("left", "middle", "right") else '"error"'


def write_data(values: Values, page: Page) -> str:
    field = values["data.prompt_key"]
    read = call(
        "rg.data.verl",
        'files.split(",")',
        prompt=show(field) if field != "prompt" else None,
        overlong=overlong_of(values),
        max_prompt_tokens="cfg.max_prompt_tokens",
    )
    functions = ["def rows(cfg: Config, files: str) -> rg.data.Rows:", f"    return {read}", "", ""]
    if "epochs" in page.fields:
        length = "cfg.steps or cfg.epochs * (len(rows(cfg, cfg.train)) // cfg.prompts)"
        functions += ["def steps(cfg: Config) -> int:", f"    return {length}", "", ""]
    page.body[:0] = functions
    most = values.whole("data.train_max_samples", -1)
    return f"[*rows(cfg, cfg.train)][:{most}]" if most > 0 else "rows(cfg, cfg.train)"


def scorer_of(values: Values, page: Page) -> str:
    """Write the function of the reward, empty where a model scores."""
    if path := values["reward.custom_reward_function.path"]:
        page.setting("reward", path, "a file of Python")
        return f"runpy.run_path(cfg.reward)[{show(values['reward.custom_reward_function.name'])}]"
    return "" if values["reward.reward_model.enable"] else "rg.scorers.math_verify()"


def write_rewards(values: Values, page: Page, scorer: str, penalised: bool, refilled: bool) -> str:
    """Write the rewards, and return the name of the column's output."""
    lines, source = page.body, "rewards"
    values["reward.reward_manager.name"]
    if not scorer:
        page.setting("reward_model", str(values["reward.reward_model.model_path"]), "a model for sequence classification")
        apart = values["reward.reward_model.enable_resource_pool"]
        gpus = values.whole("reward.reward_model.n_gpus_per_node", 8) * max(1, values.whole("reward.reward_model.nnodes", 1))
        pool = f'rg.Pool("reward", share={gpus})' if apart else ("train" if "train, rollouts" in "\n".join(lines) else "pool")
        lines += [f"    rewards = rg.RewardModel(cfg.reward_model, pool={pool}).rewards(prompts, rollout)"]
        return source
    if not refilled:
        lines += ["    rewards = rg.reward(score, prompts, rollout)"]
    if not penalised:
        return "rollout" if refilled else source
    buffer = values.whole("reward.reward_kwargs.overlong_buffer_cfg.len")
    factor = values.decimal("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor")
    values["reward.reward_kwargs.max_resp_len"]
    page.setting("buffer_tokens", buffer, "the last tokens of the limit, in which a penalty grows")
    penalty = call(
        "rg.estimators.OverlongPenalty",
        max_tokens="cfg.max_tokens",
        buffer_tokens="cfg.buffer_tokens",
        factor=show(factor) if factor != 1 else None,
    )
    given = ["rollout"] if refilled else ["rollout", "rewards"]
    lines += [f"    penalised = {call('rg.stages.shaped_rewards', *given, of=show('accuracy') if refilled else None, by=penalty)}"]
    return "penalised"


def write_evaluation(values: Values, page: Page, shape: Shape, scored: bool, chat: bool) -> None:
    """Write the evaluation, if verl had one and a function scores."""
    files, every = values["data.val_files"], values.whole("trainer.test_freq", -1)
    if shape.streamed and values["rollout.test_freq"]:
        every = values.whole("rollout.test_freq")
    if not files or every <= 0 or not scored:
        return
    page.setting("validation", files if isinstance(files, str) else ",".join(map(str, files)), "empty for no evaluation")
    page.setting("evaluate_every", every)
    samples = values.whole(f"{ROLLOUT}val_kwargs.n")
    sampled = bool(values[f"{ROLLOUT}val_kwargs.do_sample"])
    heat = values.decimal(f"{ROLLOUT}val_kwargs.temperature") if sampled else 0.0
    top_p, top_k = (
        values.decimal(f"{ROLLOUT}val_kwargs.top_p"),
        values.whole(f"{ROLLOUT}val_kwargs.top_k"),
    )
    samples = samples if heat else 1
    page.setting("samples", samples, "answers to each question held out")
    sampling = call(
        "rg.Sampling",
        max_tokens="cfg.max_tokens",
        temperature=show(heat) if heat != 1 else None,
        top_p=show(top_p) if heat and top_p != 1 else None,
        top_k=str(top_k) if heat and top_k > 0 else None,
    )
    most = values.whole("data.val_max_samples", -1)
    held = f"[*rows(cfg, cfg.validation)][:{most}]" if most > 0 else "rows(cfg, cfg.validation)"
    options = {
        "reward": "score",
        "every": "cfg.evaluate_every",
        "samples": "cfg.samples",
        "sampling": sampling,
        "at_start": "True" if values["trainer.val_before_train"] else None,
        "chat": "chat" if chat else None,
    }
    page.body += [
        "    if cfg.validation:",
        f"        held_out = {call('rg.evaluate', 'generator', held, 'weights', **options)}",
        "        outputs.append(held_out)",
    ]


def graph_name(text: str) -> str:
    """Make a name of Python's of a script's or an experiment's.

    >>> graph_name("run_qwen3-8b.fsdp")
    'run_qwen3_8b_fsdp'
    """
    name = re.sub(r"\W+", "_", text).strip("_").lower() or "training"
    return f"run_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name

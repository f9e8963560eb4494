"""Writes the recipe that stands for a training of verl, as a person would have written it."""

from dataclasses import dataclass, field, replace

from rlgraph_cli.from_verl.distillation import distillation_loss_of, distils, takes_top_tokens, teacher_kl_of, write_teachers
from rlgraph_cli.from_verl.fine_tuning import write_fine_tuning
from rlgraph_cli.from_verl.losses import KL, correction_of, critic_update_of, estimator_of, loss_of
from rlgraph_cli.from_verl.models import generator_options, write_models
from rlgraph_cli.from_verl.run import run_of, write_hosts
from rlgraph_cli.from_verl.script import Call
from rlgraph_cli.from_verl.shape import ACTOR, MODEL, ROLLOUT, Shape, shape_of
from rlgraph_cli.translate.page import Page, assemble, call, show, unless
from rlgraph_cli.translate.run import write_main
from rlgraph_cli.translate.settings import Values

OVER_TOKENS = ("optimal_token_baseline", "tir_optimal_token_baseline")


def write_recipe(started: Call, values: Values, name: str) -> str:
    """Write the recipe of a call, whose graph is called `name`. Raises ConfigError for values that verl itself would refuse."""
    page = Page()
    if "sft" in started.module:
        main = write_fine_tuning(values, page, name)
    else:
        main = Training(values, page, shape_of(started, values)).write(name)
    return assemble(page, main, name, started.source, "verl")


@dataclass
class Training:
    """A training by reinforcement learning while its graph is written: what the advantages and the update are given so far."""

    values: Values
    page: Page
    shape: Shape
    scored: list[str] = field(default_factory=lambda: ["rollout"])
    trained: list[str] = field(default_factory=lambda: ["rollout"])

    def write(self, name: str) -> list[str]:
        """Write Config, graph and cluster, and return the lines of the main block."""
        values, page, shape = self.values, self.page, self.shape
        if values.has("trainer.val_only") and values["trainer.val_before_train"]:
            return self._evaluation_alone(name)
        declare_settings(values, page, shape)
        page.body += ["def graph(cfg: Config) -> rg.Graph:"]
        taught = distils(values)  # where, in verl too, rewards are metrics alone
        kl = not taught and bool(values[f"{ACTOR}use_kl_loss"]) and bool(values.decimal(f"{ACTOR}kl_loss_coef"))
        in_reward = not taught and bool(values["algorithm.use_kl_in_reward"])
        critic = not taught and values["algorithm.adv_estimator"] == "gae"
        write_models(values, page, shape, self._model(), critic=critic, reference=kl or in_reward)
        page.body += [""]
        scorer, chat = self._rollout()
        if taught:
            self._distillation()
        else:
            self._reinforcement(kl, in_reward, critic)
        write_evaluation(values, page, shape, scored=bool(scorer), chat=chat)
        page.body += ["    weights.close(step.weights)", f"    return rg.Graph({show(name)}, *outputs)"]
        write_hosts(values, page, apart=shape.apart)
        return write_main(page, run_of(values, name))

    def _evaluation_alone(self, name: str) -> list[str]:
        """Write a graph that evaluates the model, of one step, and return the lines of the main block."""
        values, page = self.values, self.page
        files, scorer = values.files("data.val_files"), scorer_of(values, page)
        if not files or not scorer:
            raise values.error("trainer.val_only", "needs data.val_files, and a function that scores their answers")
        page.setting("model", values[f"{MODEL}path"], "a folder in Hugging Face format, or a hub id")
        page.setting("validation", files, "files of verl's schema, separated by commas")
        page.setting("max_prompt_tokens", values.count("data.max_prompt_length"))
        page.setting("max_tokens", values.count("data.max_response_length"), "tokens a response")
        page.setting("steps", 1)
        page.setting("seed", values.whole("data.seed", 0))
        write_data(values, page)
        page.body += ["def graph(cfg: Config) -> rg.Graph:"]
        options = generator_options(values, page, replace(self.shape, apart=False))
        generator = call("rg.Generator", self._model(), pool='rg.Pool("gpus")', **options)
        page.body += [f"    generator = {generator}", f"    score = {scorer}"]
        held_out = evaluation_of(values, page, "None", "1", at_start=True, chat=write_chat(values, page))
        page.body += [f"    return {call('rg.Graph', show(name), held_out)}"]
        write_hosts(values, page, apart=False)
        return write_main(page, replace(run_of(values, name), every=0))

    def _reinforcement(self, kl: bool, in_reward: bool, critic: bool) -> None:
        """Write what follows the rewards: advantages, loss and update."""
        self._old_log_probs()
        if kl or in_reward:
            self._reference(in_reward)
        corrected = self._correction()
        self._baselines(critic)
        self._advantages(self.scored, estimator_of(self.values))
        self.page.body += [f"    loss = {loss_of(self.values, self.page, self.shape, corrected)}"]
        self.trained += ["ref"] if kl else []
        self._update(critic)

    def _distillation(self) -> None:
        """Write what follows teachers: their scores, loss and update. The rewards are metrics."""
        values, page = self.values, self.page
        scored = write_teachers(values, page)
        if takes_top_tokens(values):
            self.trained += [scored]
        else:
            self._old_log_probs()
            self._correction()
            self._advantages(["rollout", scored], teacher_kl_of(values))
        page.body += [f"    loss = {distillation_loss_of(values, page)}"]
        self._update(critic=False)
        page.body += [f"    outputs.append({self.scored[1]})"]

    def _advantages(self, inputs: list[str], estimator: str) -> None:
        self.page.body += [f"    advantages = {call('rg.advantages', *inputs, estimator=estimator)}"]
        self.trained += ["advantages"]

    def _model(self) -> str:
        """Write the model's folder, if its config.json is to have other values; layers have no dropout in training."""
        given = self.values.below(f"{MODEL}override_config.")
        changed = {name: value for name, value in given.items() if value or "drop" not in name}
        if changed:
            self.page.body += [f"    model = rg.model_folder(cfg.model, config={show(changed)})"]
        return "model" if changed else "cfg.model"

    def _rollout(self) -> tuple[str, bool]:
        """Write prompts, rollout and rewards; return the function that scores, and whether there are settings of the chat template."""
        values, lines = self.values, self.page.body
        data = write_data(values, self.page)
        chat = write_chat(values, self.page)
        lines += [f"    prompts = {call('rg.prompts', data, count='cfg.prompts', chat='chat' if chat else None, seed='cfg.seed')}"]
        scorer = scorer_of(values, self.page)
        lines += [f"    score = {scorer}"] if scorer else []
        penalised, refilled = (
            values.has("reward.reward_kwargs.overlong_buffer_cfg.enable"),
            values.has("algorithm.filter_groups.enable"),
        )
        refill = None
        if refilled:
            rounds = values.whole("algorithm.filter_groups.max_num_gen_batches")
            writes = show("accuracy") if penalised else None
            refill = call("rg.options.Refill", reward="score", writes=writes, rounds=str(rounds) if rounds > 0 else None)
        streamed = self.shape.streamed and self.shape.depth > 0 and bool(values["async_training.partial_rollout"])
        options = {
            "group_size": "cfg.group_size",
            "interrupt": show("keep") if streamed else None,
            "continuous": "True" if streamed else None,
            "refill": refill,
        }
        lines += [f"    rollout = {call('generator.rollout', 'prompts', 'weights', **options)}"]
        self.scored += [write_rewards(values, self.page, scorer, penalised, refilled)]
        return scorer, chat

    def _old_log_probs(self) -> None:
        """Write the trainer's log-probs of what was sampled: ratios are taken against them unless verl bypasses them."""
        sums = self.values["algorithm.adv_estimator"] in OVER_TOKENS
        if not self.shape.bypass or sums:
            self.page.body += [f"    old = policy.log_probs(rollout{', sum_pi_squared=True' if sums else ''})"]
            self.trained += [] if self.shape.bypass else ["old"]
            self.scored += ["old"] if sums else []

    def _reference(self, in_reward: bool) -> None:
        """Write the log-probs of the reference, and the rewards less the KL to it."""
        values, lines = self.values, self.page.body
        made = "policy.base_log_probs(rollout)" if values.has(f"{MODEL}lora_rank") else "reference.log_probs(rollout)"
        lines += [f"    ref = {made}"]
        if not in_reward:
            return
        kind = KL.get(values["algorithm.kl_penalty"], values["algorithm.kl_penalty"])
        coef = self.page.setting("kl_coef", values.decimal("algorithm.kl_ctrl.kl_coef"), "of the KL to the reference that rewards lose")
        if values["algorithm.kl_ctrl.type"] == "adaptive":
            target, horizon = values.decimal("algorithm.kl_ctrl.target_kl"), values.whole("algorithm.kl_ctrl.horizon")
            coef = f"rg.estimators.AdaptiveKL({coef}, target={target}, horizon={horizon})"
        inputs = ["rollout", self.scored[1], *(["old"] if "old" in self.trained else []), "ref"]
        shaped = call("rg.stages.kl_shaped_rewards", *inputs, coef=coef, estimator=unless("k1", kind))
        lines += [f"    shaped = {shaped}"]
        self.scored[1] = "shaped"

    def _correction(self) -> dict[str, str]:
        """Write the correction of the rollout, as a node where there are old log-probs; return its options."""
        corrected = correction_of(self.values, self.page, self.shape)
        if corrected and not self.shape.bypass:
            self.page.body += [f"    correction = {call('rg.stages.rollout_correction', 'rollout', 'old', **corrected)}"]
            self.trained += ["correction"]
            self.scored += ["correction"] if "rejections" in corrected else []
        return corrected

    def _baselines(self, critic: bool) -> None:
        """Write what the estimator compares rewards with: a critic's values, or a greedy response."""
        if critic:
            self.page.body += ["    values = critic.values(rollout)"]
            self.scored += ["values"]
        if self.values["algorithm.adv_estimator"] == "remax":
            self.page.body += [
                "    best = rg.Sampling(max_tokens=cfg.max_tokens, temperature=0)",
                '    greedy = generator.rollout(prompts, weights, sampling=best, name="greedy")',
                '    baseline = rg.reward(score, prompts, greedy, writes="baseline_rewards", name="baseline")',
            ]
            self.scored += ["baseline"]

    def _update(self, critic: bool) -> None:
        """Write the updates, and the outputs of the graph."""
        values, lines = self.values, self.page.body
        epochs, warmup = values.count(f"{ACTOR}ppo_epochs"), values.whole("trainer.critic_warmup")
        options = {
            "loss": "loss",
            "epochs": str(epochs) if epochs > 1 else None,
            "mini_batches": "cfg.mini_batches",
            "critic_warmup": str(warmup) if critic and warmup else None,
        }
        lines += [f"    step = {call('policy.update', *self.trained, **options)}"]
        lines += [f"    critic_step = {critic_update_of(values, self.shape)}"] if critic else []
        lines += [f"    outputs = [step.metrics{', critic_step.metrics' if critic else ''}]"]


def declare_settings(values: Values, page: Page, shape: Shape) -> None:
    """Declare what a run is about."""
    page.setting("model", values[f"{MODEL}path"], "a folder in Hugging Face format, or a hub id")
    files = values.files("data.train_files")
    page.setting("train", files, "files of verl's schema, separated by commas")
    page.setting("prompts", shape.prompts, "prompts a step")
    page.setting("group_size", values.count(f"{ROLLOUT}n"), "responses a prompt")
    page.setting("max_prompt_tokens", values.count("data.max_prompt_length"))
    page.setting("max_tokens", values.count("data.max_response_length"), "tokens a response")
    page.setting("mini_batches", shape.mini_batches, "optimizer steps a step")
    page.setting("lr", values.decimal(f"{ACTOR}optim.lr"))
    page.setting("depth", shape.depth, "staleness bound in weight versions; 0 is on-policy")
    steps = max(0, values.whole("trainer.total_training_steps", 0))
    if shape.streamed and values["rollout.total_rollout_steps"]:
        steps = max(1, values.whole("rollout.total_rollout_steps") // shape.prompts)
    if steps:
        page.setting("steps", steps)
    else:
        page.setting("epochs", values.count("trainer.total_epochs"), "passes over the data")
        page.setting("steps", 0, "0: as many as the epochs have")
    page.setting("seed", values.whole("data.seed", 0))


def overlong_of(values: Values) -> str:
    """Choose what becomes of prompts that are too long."""
    if values["data.filter_overlong_prompts"]:
        return '"drop"'
    return '"truncate_left"' if values["data.truncation"] == "left" else '"error"'


def write_data(values: Values, page: Page) -> str:
    field = values["data.prompt_key"]
    read = call(
        "rg.data.verl",
        'files.split(",")',
        prompt=unless("prompt", field),
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
        page.imports.append("from runpy import run_path")
        return f"run_path(cfg.reward)[{show(values['reward.custom_reward_function.name'])}]"
    return "" if values["reward.reward_model.enable"] else "rg.scorers.math_verify()"


def write_rewards(values: Values, page: Page, scorer: str, penalised: bool, refilled: bool) -> str:
    """Write the rewards, and return the name of the column's output."""
    lines, source = page.body, "rewards"
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
    limit = values.whole("reward.reward_kwargs.max_resp_len", 0)
    longest = str(limit) if limit and limit != values.count("data.max_response_length") else "cfg.max_tokens"
    page.setting("buffer_tokens", buffer, "the last tokens of the limit, in which a penalty grows")
    penalty = call(
        "rg.estimators.OverlongPenalty",
        max_tokens=longest,
        buffer_tokens="cfg.buffer_tokens",
        factor=unless(1, factor),
    )
    given = ["rollout"] if refilled else ["rollout", "rewards"]
    lines += [f"    penalised = {call('rg.stages.shaped_rewards', *given, of=show('accuracy') if refilled else None, by=penalty)}"]
    return "penalised"


def write_evaluation(values: Values, page: Page, shape: Shape, scored: bool, chat: bool) -> None:
    """Write the evaluation, if verl had one and a function scores."""
    files, every = values.files("data.val_files"), values.whole("trainer.test_freq", -1)
    if shape.streamed and values["rollout.test_freq"]:
        every = values.whole("rollout.test_freq")
    if not files or every <= 0 or not scored:
        return
    page.setting("validation", files, "empty for no evaluation")
    every_steps = page.setting("evaluate_every", every)
    held_out = evaluation_of(values, page, "weights", every_steps, at_start=bool(values["trainer.val_before_train"]), chat=chat)
    page.body += ["    if cfg.validation:", f"        held_out = {held_out}", "        outputs.append(held_out)"]


def write_chat(values: Values, page: Page) -> bool:
    """Write the settings of the chat template, and tell whether there are any."""
    chat = values.below("data.apply_chat_template_kwargs.")
    page.body += [f"    chat = rg.options.Chat(template_kwargs={show(chat)})"] if chat else []
    return bool(chat)


def evaluation_of(values: Values, page: Page, weights: str, every: str, *, at_start: bool, chat: bool) -> str:
    """Write the call of an evaluation by the function `score`."""
    samples = values.count(f"{ROLLOUT}val_kwargs.n")
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
        temperature=unless(1, heat),
        top_p=show(top_p) if heat and top_p != 1 else None,
        top_k=str(top_k) if heat and top_k > 0 else None,
    )
    most = values.whole("data.val_max_samples", -1)
    held = f"[*rows(cfg, cfg.validation)][:{most}]" if most > 0 else "rows(cfg, cfg.validation)"
    options = {
        "reward": "score",
        "every": every,
        "samples": "cfg.samples",
        "sampling": sampling,
        "at_start": "True" if at_start else None,
        "chat": "chat" if chat else None,
    }
    return call("rg.evaluate", "generator", held, weights, **options)

"""Writes the teachers of a distillation, and what the update takes from them."""

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.shape import ACTOR
from rlgraph_cli.translate.page import Page, call, show, unless
from rlgraph_cli.translate.settings import Values

LOSS, TEACHERS = "distillation.distillation_loss.", "distillation.teacher_models."


def distils(values: Values) -> bool:
    return values.has("distillation.enabled")


def takes_top_tokens(values: Values) -> bool:
    """Tell whether the loss compares distributions: the teacher's most probable tokens, not the sampled token alone."""
    return distils(values) and values[f"{LOSS}loss_mode"] == "forward_kl_topk"


def write_teachers(values: Values, page: Page) -> str:
    """Write the teachers, each on its pool, and their scores. Returns their output. Raises ConfigError for a loss without counterpart."""
    mode = values[f"{LOSS}loss_mode"]
    if (mode, bool(values[f"{LOSS}use_policy_gradient"])) not in (("k1", True), ("forward_kl_topk", False)):
        rule = "has no counterpart here; k1 with use_policy_gradient=True has one, and forward_kl_topk without"
        raise values.error(f"{LOSS}loss_mode", rule)
    if values[f"{LOSS}use_task_rewards"]:
        raise values.error(f"{LOSS}use_task_rewards", "has no counterpart here: a loss distils, or follows the rewards; give False")
    top_k = page.setting("top_k", values.count(f"{LOSS}topk"), "tokens of the teacher a position") if mode != "k1" else None
    given: dict[str, dict[str, object]] = {}
    for key, value in values.below(TEACHERS).items():
        name, _, rest = key.partition(".")
        given.setdefault(name, {})[rest] = value
    if len(given) > 1:
        given.pop("teacher_model", None)  # as verl does
    made = {}
    for name, own in given.items():
        if not own.get("model_path") or not name.isidentifier() or (len(given) > 1 and not own.get("key")):
            raise ConfigError(f"from-verl: {TEACHERS}{name} needs a model_path, and a key if there are several teachers")
        field = page.setting(name if name.startswith("teacher") else f"teacher_{name}", str(own["model_path"]), "of the model's vocabulary")
        gpus = teacher_gpus(values) if len(given) == 1 else _gpus(own)
        pool = f"rg.Pool({show(field.removeprefix('cfg.'))}, share={gpus})"
        made[str(own.get("key"))] = call("rg.Teacher", field, pool=pool, micro_batch_tokens="cfg.micro_batch_tokens")
    if len(made) != max(1, len(given)):
        raise ConfigError(f"from-verl: {TEACHERS}NAME.model_path: set at least one teacher, each with its own key, not {list(made)}")
    lines = page.body
    if len(made) > 1:
        lines += ["    teachers = {", *(f"        {show(key)}: {teacher}," for key, teacher in made.items()), "    }"]
        lines += [f"    scored = {call('rg.options.by_source', 'prompts', 'rollout', teachers='teachers', top_k=top_k)}"]
        return "scored"
    lines += [f"    teacher = {next(iter(made.values()))}"]
    lines += [f"    scored = {'teacher.log_probs(rollout)' if top_k is None else call('teacher.top_log_probs', 'rollout', top_k=top_k)}"]
    return "scored"


def teacher_gpus(values: Values) -> int:
    return values.count("distillation.nnodes") * values.count("distillation.n_gpus_per_node")


def _gpus(own: dict[str, object]) -> int:
    sizes = (own.get("num_replicas", 1), own.get("inference.tensor_model_parallel_size", 2))
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(f"from-verl: {TEACHERS}: replicas and GPUs of each must be at least 1, not {sizes}")
    return sizes[0] * sizes[1]  # type: ignore[operator, no-any-return]


def distillation_loss_of(values: Values, page: Page) -> str:
    """Write the loss of a distillation: of distributions, or the clipped one, which follows the KL of the sampled token."""
    aggregation, horizon = values[f"{ACTOR}loss_agg_mode"], None
    if aggregation == "seq-mean-token-sum-norm":
        horizon = str(values.whole(f"{ACTOR}loss_scale_factor", 0) or "cfg.max_tokens")
    options = {"aggregation": unless("token-mean", aggregation), "horizon": horizon}
    if takes_top_tokens(values):
        return call("rg.losses.DistillationLoss", **options)
    low, high = (page.setting(f"clip_{side}", values.decimal(f"{LOSS}clip_ratio_{side}")) for side in ("low", "high"))
    return call("rg.ClippedLoss", clip_low=low, clip_high=high, **options)


def teacher_kl_of(values: Values) -> str:
    clip = values.decimal(f"{LOSS}loss_max_clamp")
    return call("rg.estimators.TeacherKL", clip=show(clip) if clip else None)

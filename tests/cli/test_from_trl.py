"""`rlgraph from-trl`: what is read without running it, what becomes of it, the recipe, and what is refused."""

import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import forked_workers
from support.paths import TESTS
from support.qwen3_shapes import QWEN3_8B
from typer.testing import CliRunner

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import ConfigError
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES
from rlgraph_cli import recipe as recipes
from rlgraph_cli.app import app
from rlgraph_cli.from_trl.command import translate
from rlgraph_cli.from_trl.data import Data
from rlgraph_cli.from_trl.recipe import write_recipe
from rlgraph_cli.from_trl.rewards import Reward
from rlgraph_cli.from_trl.script import Script, flags_of, read_script, tables_of
from rlgraph_cli.from_trl.values import Scope, Source
from rlgraph_cli.translate.settings import Setting, Unread, Values

FACTS: dict[str, Any] = json.loads((TESTS / "oracle" / "trl_scripts.json").read_text())
GRPO = """
import os
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

open("written_by_the_script.txt", "w")
PATTERN = re.compile(r"-?[0-9]+")
GROUP = 2 * 2
NAME = "tiny"
shared = {"max_completion_length": 8, "num_generations": GROUP}

def numbers(text):
    return PATTERN.findall(text)

def exact(prompts, completions, answer, **kwargs):
    said = [each[0]["content"] if isinstance(each, list) else each for each in completions]
    return [float(numbers(text) == [str(right)]) for text, right in zip(said, answer)]

async def brief(completions, scale=1.0, **kwargs):
    return [None for each in completions]

def ask(row):
    return {"prompt": [{"role": "user", "content": row["question"]}]}

rows = load_dataset("json", data_files="rows.jsonl", split="train")
rows = rows.map(ask, remove_columns=["question"]).filter(lambda row: row["answer"] != "9")
args = GRPOConfig(output_dir=f"runs/{NAME}-{GROUP}", **shared, per_device_train_batch_size=GROUP, beta=0.04, use_bias_correction_kl=False)
args.num_iterations = 2
trainer = GRPOTrainer("MODEL", [exact, brief], args, train_dataset=rows, peft_config=LoraConfig(r=4))
trainer.train()
"""
SFT = """
from trl import SFTConfig, SFTTrainer
from datasets import load_dataset

def main(size=2):
    data = load_dataset("json", data_files={"train": "rows.jsonl"})["train"].select(range(size * 4))
    config = SFTConfig(learning_rate=1e-3, per_device_train_batch_size=2, max_steps=2, packing=True, warmup_steps=1)
    config.lr_scheduler_type = "constant_with_warmup"
    SFTTrainer(model="MODEL", args=config, train_dataset=data).train()

main(2)
"""
DPO = """
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from datasets import load_dataset

def main(script_args, training_args, model_args):
    data = load_dataset(script_args.dataset_name)
    trainer = DPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=data[script_args.dataset_train_split],
        eval_dataset=data["test"] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
"""
SCRIPTS = {
    "GRPO": GRPO,
    "SFT": SFT,
    "DPO": DPO.replace("    main(*parser.parse_args_and_config())", "    a, b, c = parser.parse_args_and_config()\n    main(a, b, c)"),
}
DPO_FLAGS = [
    "--model_name_or_path",
    "MODEL",
    "--dataset_name",
    "rows.jsonl",
    "--max_steps=2",
    "--use_peft",
    "--per_device_train_batch_size",
    "2",
]


def write(folder: Path, text: str, model: str = "tiny") -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("MODEL", model).replace('"rows.jsonl"', repr(str(folder / "rows.jsonl"))))
    return path


def given(script: Script) -> dict[str, Any]:
    return {setting.key: setting.value for setting in script.settings}


def test_a_script_is_read_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = read_script(write(tmp_path, GRPO), ["--learning_rate", "2e-6"])
    assert not (tmp_path / "written_by_the_script.txt").exists()
    found = given(script)
    assert {
        key: found[key] for key in ("output_dir", "num_generations", "per_device_train_batch_size", "num_iterations", "peft_config.r")
    } == {"output_dir": "runs/tiny-4", "num_generations": 4, "per_device_train_batch_size": 4, "num_iterations": 2, "peft_config.r": 4}
    assert (found["learning_rate"], found["model"], script.kind) == (2e-6, "tiny", "GRPO")
    assert [(each.name, each.arguments) for each in script.rewards] == [
        ("exact", ["prompts", "completions", "answer"]),
        ("brief", ["completions"]),
    ]
    assert {each.key: each.line for each in script.settings}["beta"] == 29


def test_a_recipe_has_the_functions_of_the_script_and_what_they_read(tmp_path: Path) -> None:
    file, table = translate(write(tmp_path, GRPO), [], tmp_path / "made.py", skip=False)
    text = file.read_text()
    assert 'PATTERN = re.compile(r"-?[0-9]+")' in text
    assert "def numbers(text):" in text
    assert "import os" not in text
    assert "trl" not in re.sub(r'""".*?"""', "", text, flags=re.S)
    assert ".map(lambda row: row | ask(row)).filter(lambda row: row['answer'] != '9')" in text
    assert "train.py" not in table
    assert re.search(r"   29  beta=0\.04 +rg\.Reference", table)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": "1 + 1 =", "answer": str(each)}) + "\n" for each in (2, 3, 9, 2, 2, 2)))
    made = recipes.read(file)
    graph = made.graph(made.configured([]))
    update = next(node for node in graph.nodes if node.name == "update")
    assert (update.operation.loss.kl_coef, update.operation.loss.clip_c, update.operation.schedule.epochs) == (0.04, None, 2)
    assert update.model.adapter == rg.LoRA(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    scope: dict[str, Any] = {"__name__": "made"}
    exec(compile(text, str(file), "exec"), scope)
    asked = scope["score"](["2", "3"], ["2", "2"], ["1 + 1 ="] * 2, prompt_messages=["[]"] * 2)
    with pytest.raises(StopIteration) as done:
        asked.send(None)
    assert done.value.value == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("print(1)", [], "the script makes no trainer; from-trl reads scripts with one of GRPOTrainer, SFTTrainer, DPOTrainer"),
        (f"{SFT}\nDPOTrainer('m')", [], r"the script makes 2 trainers \(train\.py:\d+, train\.py:\d+\)"),
        ("def f(:\n", [], r"train\.py:1: this is not Python"),
        (GRPO.replace("beta=", "betta="), [], r"train\.py:29: betta=0\.04: TRL 1\.16 has no such setting; did you mean beta\?"),
        (GRPO.replace("beta=0.04", "beta=os.cpu_count()"), [], r"train\.py:29: beta=.*known only when the script runs.*--beta VALUE"),
        (
            GRPO.replace("args = GRPO", "args = make(); GRPO"),
            [],
            r"train\.py:29: make\(\) is known only when the script runs; write its value",
        ),
        (
            GRPO.replace("GROUP = 2 * 2", "GROUP = 2 * 2\nfor each in range(3): GROUP = each"),
            [],
            "GROUP changes in a way that only running",
        ),
        (GRPO.replace("beta=0.04", "beta='x' * 10**9"), [], "is too large; write"),
        (GRPO.replace("beta=0.04", "beta=f'{GROUP:.2f}'"), [], "has a format specification; write the text"),
        (SFT.replace("def main(size=2):", "def main(size=2):\n    main(size)").replace("main(2)", ""), [], "depends on itself"),
        (GRPO.replace("beta=0.04", "loss_type='vespo'"), [], "vespo has no counterpart; known are dapo, grpo, dr_grpo, cispo, sapo"),
        (GRPO.replace("beta=0.04", "top_entropy_quantile=0.2"), [], "a loss of some tokens"),
        (
            GRPO.replace("GROUP = 2 * 2", "GROUP = 3").replace("size=GROUP", "size=4"),
            [],
            "num_generations=3 does not divide the 4 completions",
        ),
        (GRPO.replace("beta=0.04", "max_steps=2.5"), [], r"train\.py:29: max_steps=2\.5 is not a whole number"),
        (GRPO.replace("[exact, brief]", "[lambda completions: [1.0]]"), [], "is not a function that the script defines"),
        (GRPO.replace("scale=1.0", "environments"), [], "brief reads environments, which rewards of a recipe do not get"),
        (
            GRPO.replace("return PATTERN", "return trl_set or PATTERN").replace("import GRPOConfig", "import trl_set, GRPOConfig"),
            [],
            "TRL's, which a",
        ),
        (GRPO.replace("rows.map(ask,", "rows.map(ask, batched=True,"), [], r"train_dataset\.map\(ask\): is not a function of one row"),
        (SFT, ["learning_rate"], "'learning_rate' is not a flag"),
        (SFT.replace("SFTConfig(", "SFTConfig(completion_only_loss=False, "), [], "False has no counterpart; known are True, None"),
        (SFT + "\nclass Own(SFTTrainer): pass\n", [], None),
        (
            SFT.replace("    SFTTrainer(", "    Own(").replace("def main", "class Own(SFTTrainer): pass\ndef main"),
            [],
            "trainer of the script's own",
        ),
        (GRPO.replace("beta=0.04", "repetition_penalty=1.1"), [], "a penalty depends on the tokens before"),
        (GRPO.replace("beta=0.04", "generation_kwargs={'bad_words': ['a']}"), [], "except for the texts of stop or stop_strings"),
        (SCRIPTS["DPO"], [], r"load_dataset\(script_args.dataset_name\) names no data set; pass -- --dataset_name FILE"),
        (SCRIPTS["DPO"], [*DPO_FLAGS, "--loss_type", "hinge"], "hinge has no counterpart"),
    ],
)
def test_what_has_no_counterpart_is_one_error(text: str, flags: list[str], says: str | None, tmp_path: Path) -> None:
    if says is None:
        translate(write(tmp_path, text), flags, tmp_path / "made.py", skip=False)
        return
    with pytest.raises(ConfigError, match=says):
        translate(write(tmp_path, text), flags, tmp_path / "made.py", skip=False)
    assert not (tmp_path / "made.py").exists()


def test_what_is_not_possible_can_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, GRPO.replace("beta=0.04", "beta=0.04, top_entropy_quantile=0.2, min_p=os.cpu_count()"))
    _, table = translate(path, [], tmp_path / "made.py", skip=True)
    assert re.search(r"IS NOT POSSIBLE \(2\)", table)


def test_flags_are_those_of_the_parser_and_of_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("learning_rate: 1e-5\nmax_steps: 7\n")
    found = flags_of(["--config", str(tmp_path / "config.yaml"), "--max_steps=3", "--packing", "--no_bf16", "--targets", "a", "b"])
    assert found == {"learning_rate": 1e-5, "max_steps": 3, "packing": True, "bf16": False, "targets": ["a", "b"]}
    script = read_script(write(tmp_path, SCRIPTS["DPO"]), [*DPO_FLAGS, "--config", str(tmp_path / "config.yaml")])
    assert (given(script)["model"], given(script)["learning_rate"]) == ("MODEL", 1e-5)


@pytest.mark.parametrize("stop", ["'stop': '</answer>'", "'stop_strings': ['</answer>']"])
def test_ways_to_sample_become_those_of_the_recipe(stop: str, tmp_path: Path) -> None:
    sampled = f"beta=0.04, min_p=0.05, generation_kwargs={{{stop}}}, repetition_penalty=1.0"
    file, _ = translate(write(tmp_path, GRPO.replace("beta=0.04", sampled)), [], tmp_path / "made.py", skip=False)
    made = recipes.read(file)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n' * 4)
    rollout = next(node for node in made.graph(made.configured([])).nodes if node.name == "rollout")
    assert (rollout.operation.sampling.min_p, rollout.operation.sampling.stop) == (0.05, ("</answer>",))


@pytest.mark.parametrize("case", json.loads((TESTS / "oracle" / "trl_grpo.json").read_text()), ids=lambda case: str(case["options"]))
def test_the_first_losses_of_a_recipe_are_those_of_trls_trainer(case: dict[str, Any], tmp_path: Path) -> None:
    """TRL computes in float32, and adds 1e-4 to the standard deviation of a group where rlgraph adds 1e-6."""
    options = "".join(f", {name}={value!r}" for name, value in case["options"].items())
    text = GRPO.replace(", beta=0.04, use_bias_correction_kl=False", options)
    file, _ = translate(write(tmp_path, text), [], tmp_path / "made.py", skip=False)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n' * 4)
    made = recipes.read(file)
    operations = {node.name: node.operation for node in made.graph(made.configured([])).nodes}
    rewards, advantages = torch.tensor(case["rewards"]), torch.tensor(case["advantages"])
    ones = torch.ones(len(rewards), 1, dtype=torch.bool)
    given = {"rewards": rewards, "group_ids": torch.arange(len(rewards)) // 4, "response_mask": ones}
    torch.testing.assert_close(operations["advantages"].function(given)["advantages"][:, 0], advantages, atol=1e-3, rtol=1e-3)
    assert len({one["loss"] for one in case["losses"]}) == 2
    for one in case["losses"]:
        columns = {name: torch.tensor(value) for name, value in one.items()}
        mask = columns["response_mask"] = columns["response_mask"].bool()
        columns["advantages"] = columns["advantages"][:, None] * mask
        loss, _ = operations["update"].loss(columns["log_probs"], columns, rg.algorithms.Totals.of(mask))
        assert float(loss) == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)


JUNK = ("x", -1, 0, 2.5, True, [1], ["a"], {"a": 1}, 'a"; import os; b="', "a\n\nimport os\n", None)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_values_that_are_none_are_errors_and_never_code(kind: str, tmp_path: Path) -> None:
    script = read_script(write(tmp_path, SCRIPTS[kind]), DPO_FLAGS if kind == "DPO" else [])
    given = [script.tables.outcome_of(each) for each in script.settings]
    for key in script.tables.rules["becomes"]:
        for value in JUNK:
            outcomes = [*given, script.tables.outcome_of(Setting(key, value, f"{key}={value}"))]
            try:
                tree = ast.parse(write_recipe(script, Values.of(script.tables, "train.py", outcomes), "written"))
            except ConfigError:
                continue
            names = {alias.name for part in ast.walk(tree) if isinstance(part, ast.Import | ast.ImportFrom) for alias in part.names}
            assert names <= {"dataclass", "rlgraph", "re", "json"}, (key, value)


READ_ELSEWHERE = ("reward_funcs", "train_dataset", "eval_dataset", "reward_model_name_or_path")
MORE = {
    "GRPO": ["--use_vllm", "--vllm_mode", "server", "--vllm_tensor_parallel_size", "2", "--eval_strategy", "steps", "--report_to", "wandb"],
    "SFT": ["--chat_template_path", "chat.jinja", "--report_to", "wandb"],
    "DPO": ["--load_in_4bit", "--report_to", "wandb"],
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_writer_reads_each_setting_that_becomes_something(kind: str, tmp_path: Path) -> None:
    text, read = SCRIPTS[kind].replace("train_dataset=rows,", "train_dataset=rows, eval_dataset=rows,"), set[str]()
    long = ["--max_steps", "-1", "--num_train_epochs", "2", "--use_peft"]
    sapo = [*long, "--loss_type", "sapo", "--use_vllm"] if kind == "GRPO" else long
    for more in ([], sapo, MORE[kind]):
        flags = [*(DPO_FLAGS if kind == "DPO" else []), *more]
        script = read_script(write(tmp_path, text), flags)
        values = Values.of(script.tables, "train.py", [script.tables.outcome_of(each) for each in script.settings])
        write_recipe(script, values, "written")
        read |= values.read
    keys = {key for key in tables_of(kind).rules["becomes"] if not key.startswith(READ_ELSEWHERE)}
    assert keys - read == set()


def stand_in(folder: Path) -> dict[str, str]:
    """Make a model, rows and an adapter that recipes compile with, and return the settings that name them."""
    (folder / "model").mkdir()
    known = {"model_type": "qwen3", "max_position_embeddings": 262144, "eos_token_id": 0}
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_8B | known))
    save_file({"weight": torch.zeros(1)}, folder / "model" / "model.safetensors")
    asked = [{"role": "user", "content": "1 + 1 ="}]
    said = [{"role": "assistant", "content": "2"}]
    row = {
        "prompt": asked,
        "messages": [*asked, *said],
        "chosen": said,
        "rejected": asked,
        "solution": "2",
        "answer": "2",
        "reference_answer": "2",
    }
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2048)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    save_file({"weight": torch.zeros(1)}, folder / "adapter" / "adapter_model.safetensors")
    (folder / "chat.jinja").write_text("{{ messages }}")
    rows = str(folder / "rows.jsonl")
    own = {"model": "model", "adapter": "adapter", "chat_template": "chat.jinja"}
    return {"train": rows, "validation": rows} | {name: str(folder / file) for name, file in own.items()}


def script_of(name: str, folder: Path) -> Script:
    """Build the script that the facts of a training tell, with functions that stand for its own."""
    facts = FACTS[name]
    functions = [
        f"def {reward}({', '.join(arguments)}, **kwargs):\n    return [0.0 for _ in completions]"
        for reward, arguments in facts["rewards"]
        if arguments
    ]
    path = folder / "stand_in.py"
    path.write_text("\n\n".join([*functions, "def make(row):\n    return {}\n"]))
    tree = ast.parse(path.read_text())
    source = Source({}, path, [Scope(0, 10**9)])
    source.collect(tree.body, source.scopes[0])
    defined = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    rewards = tuple(
        Reward(reward, defined.get(reward), ast.Name(reward, ast.Load(), lineno=99) if reward in defined else None)
        for reward, _ in facts["rewards"]
    )
    settings = tuple(Setting(key, value[0] if value else Unread("is not read"), key) for key, *value in facts["settings"])
    made = facts["data"]
    data = (
        Data(
            "rows",
            made["taken"],
            steps=[".map(lambda row: row | make(row))"] * made["made"],
            reads=[ast.Name("make", ast.Load(), lineno=99)],
        )
        if made
        else None
    )
    return Script(
        path, facts["kind"], tables_of(facts["kind"]), settings, data, Data("rows") if facts["validation"] else None, rewards, source
    )


WITHOUT = {  # what a training needs and a recipe does not have
    "examples/scripts/grpo_2048.py 0": "environments of TRL",
    "examples/scripts/grpo_agent.py 0": "tools of TRL",
    "examples/scripts/sft_diffusion_gemma.py 0": "a trainer of the script's own",
    "docs/source/grpo_trainer 22": "environments of TRL",
    "docs/source/grpo_trainer 23": "environments of TRL",
    "docs/source/sft_trainer 11": "adds tokens of another model",
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_trainings_of_trl_become_recipes_that_compile(tmp_path: Path) -> None:
    own, kinds, failed = stand_in(tmp_path), Counter[str](), {}
    for name in FACTS:
        script = script_of(name, tmp_path)
        outcomes = [script.tables.outcome_of(setting) for setting in script.settings]
        kinds.update(outcome.kind for outcome in outcomes)
        failed[name] = "; ".join(outcome.text for outcome in outcomes if outcome.kind not in ("becomes", "no effect"))
        if failed[name]:
            continue
        file = tmp_path / f"{re.sub(r'[^a-z0-9]', '_', name)}.py"
        try:
            file.write_text(write_recipe(script, Values.of(script.tables, "train.py", outcomes), file.stem))
            found = recipes.read(file)
            cfg = found.configured([f"{key}={value}" for key, value in own.items() if key in found.config_class.__dataclass_fields__])
            assert found.cluster_of is not None
            rg.compile(found.graph(cfg), found.cluster_of(cfg))
        except rg.RlgraphError as error:
            failed[name] = str(error)
    failed = {name: why for name, why in failed.items() if why}
    assert {name: WITHOUT.get(name, "") in why for name, why in failed.items()} == dict.fromkeys(WITHOUT, True), failed
    explained = kinds["becomes"] + kinds["no effect"]
    assert len(failed) <= 0.2 * len(FACTS)
    assert explained >= 0.95 * kinds.total()
    page = " ".join((TESTS.parent / "docs" / "from_trl.md").read_text().split())
    assert f"Of {len(FACTS)} trainings" in page, (len(FACTS), kinds)
    assert f"with {kinds.total():,} settings, {explained:,} settings have" in page, kinds
    assert f"and {len(FACTS) - len(failed)} become recipes" in page


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.stage("recipes")
def test_recipes_of_scripts_train(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, SCRIPTS[kind], str(tiny_model(tmp_path / "model", chat=True, context=1024)))
    said = {"chosen": "2", "rejected": "3", "prompt": "1 + 1 ="} if kind == "DPO" else {"text": "1 + 1 = 2"} if kind == "SFT" else {}
    rows = [said or {"question": f"{each} + 1 =", "answer": str(each + 1)} for each in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [word.replace("MODEL", str(tmp_path / "model")).replace("rows.jsonl", str(tmp_path / "rows.jsonl")) for word in DPO_FLAGS]
    file, _ = translate(path, flags if kind == "DPO" else ["--max_steps", "4"], tmp_path / "made.py", skip=False)
    found = recipes.read(file)
    cfg = found.configured(["gpus=0"])
    assert found.cluster_of is not None
    with rg.compile(found.graph(cfg), found.cluster_of(cfg)).run_here() as job:
        steps = [step.metrics for step in job.steps(2)]
    expected = {"GRPO": "actor/kl_loss", "SFT": "actor/nll", "DPO": "preference/margin"}[kind]
    assert all(expected in step for step in steps), sorted(steps[0])


@pytest.mark.stage("recipes")
def test_a_script_runs_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With forked workers: on Ray `rlgraph run` is tried by the test of the wheel."""
    for name in ("argv", "path"):  # the command changes both
        monkeypatch.setattr(sys, name, [*vars(sys)[name]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    path = write(tmp_path, SFT, str(tiny_model(tmp_path / "model", chat=True, context=1024)))
    (tmp_path / "rows.jsonl").write_text('{"text": "1 + 1 = 2"}\n' * 8)
    sets = ["--set", "gpus=0", "--set", f"out={tmp_path / 'run'}"]
    done = CliRunner().invoke(app, ["from-trl", str(path), "-o", str(tmp_path / "made.py"), "--plan", "--run", *sets])
    assert done.exit_code == 0, done.output
    assert "BECOMES (" in done.output
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1

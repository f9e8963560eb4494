"""The command `rlgraph`, as a program of its own: what it prints, writes and refuses, and how it ends."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from support import forked_programs
from support.digests import ITEMS, odd_tokens
from support.grpo import grpo_graph
from support.simulated_run import simulate_run
from support.tunable_graph import build
from typer.testing import CliRunner

import rlgraph as rg
from rlgraph import diagnosis
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import ConfigError
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob
from rlgraph_cli import recipe as recipes
from rlgraph_cli.app import app
from rlgraph_cli.choices import choices_of

ROOT = Path(__file__).parents[2]
RECIPE = """
from dataclasses import dataclass

import torch

import rlgraph as rg


@dataclass
class Config:
    count: int = 4
    cores: int = 2


@rg.node(reads="prompt_texts", writes="rewards")
def brevity(batch):
    return {"rewards": torch.tensor([-float(len(text)) for text in batch["prompt_texts"]])}


def graph(cfg):
    if cfg.count == 13:
        raise ZeroDivisionError("a mistake of the recipe's own")
    return rg.Graph("lengths", brevity(rg.prompts([{"prompt": "1 + 1 ="}], count=cfg.count)))


def cluster(cfg):
    return rg.Cluster(cpus=cfg.cores)


if __name__ == "__main__":
    import sys

    cfg = rg.config(Config)
    with rg.compile(graph(cfg), cluster(cfg)).run_here() as job:
        print("ran", [step.index for step in job.steps(2)], cfg.count, "ray" in sys.modules)
"""


def rlgraph(*arguments: str, cwd: Path) -> forked_programs.Ended:
    """Run `rlgraph ARGUMENTS` in a folder."""
    return forked_programs.run("-m", "rlgraph", *arguments, cwd=cwd, COLUMNS="120", NO_COLOR="1")


def rlgraph_anew(*arguments: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run it in an interpreter of its own, which takes seconds."""
    command = [sys.executable, "-m", "rlgraph", *arguments]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"} | environment
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "lengths.py").write_text(RECIPE)
    return tmp_path / "lengths.py"


def test_help_lists_the_commands_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rlgraph_cli import main\nsys.argv = ['rlgraph', '--help']\ntry:\n    main()\n"
        "except SystemExit as end:\n    print(end.code, [m for m in ('torch', 'ray', 'numpy', 'rlgraph') if m in sys.modules])"
    )
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=250, check=True
    )
    assert ended.stdout.splitlines()[-1] == "0 []"
    assert all(name in ended.stdout for name in ("plan", "run", "tune", "export", "report", "compare", "doctor"))


PLAN_AND_TUNE = """
import contextlib, sys, rlgraph_cli
for sys.argv in (sys.argv, ["rlgraph", "tune", "lengths.py", "count=4,8"]):
    with contextlib.suppress(SystemExit):
        rlgraph_cli.main()
print("ray" in sys.modules)
"""


def test_plan_prints_and_draws_the_plan_and_starts_nothing_as_tune_does(recipe: Path) -> None:
    command = [sys.executable, "-c", PLAN_AND_TUNE, "plan", "lengths.py", "count=8", "--draw", "plan.svg", "--timeline", "timeline.json"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=recipe.parent, env=variables, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("lengths on 2 cores:")
    assert "2 plans compared on 2 cores" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "False", "planning has imported Ray"
    assert (recipe.parent / "plan.svg").read_text().startswith("<svg")
    assert json.loads((recipe.parent / "timeline.json").read_text())


def test_plan_is_for_another_machine_where_its_options_say_so(recipe: Path) -> None:
    ended = rlgraph("plan", "lengths.py", "cores=3", "--cpus", "24", "--json", cwd=recipe.parent)
    assert rg.Plan.from_json(ended.stdout).cluster == rg.Cluster(cpus=24)
    ended = rlgraph("plan", "lengths.py", "--gpus", "8", "--gpu", "H100", "--json", cwd=recipe.parent)
    assert rg.Plan.from_json(ended.stdout).cluster == rg.Cluster(gpus=8, cpus=64, gpu="H100", gpu_memory_bytes=80 * 10**9)
    found = recipes.read(recipe)
    assert found.cluster_of is not None
    assert found.cluster_of(found.configured(["cores=3"])) == rg.Cluster(cpus=3)


def test_run_does_what_python_does_with_a_recipe(recipe: Path) -> None:
    ended = rlgraph_anew("run", "lengths.py", "count=6", cwd=recipe.parent)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "ran [0, 1] 6 False"


REFUSED = {
    "a page both served and written": (["report", "a", "--watch", "--out", "page.html"], 2, "--watch serves the page and --out writes it"),
    "a profile of nothing": (["run", "lengths.py", "--profile", "0"], 2, "error: --profile 0: recipe 'lengths.py' does not call rg.record"),
    "a profile of no steps": (["run", "lengths.py", "--profile", "3..5"], 2, "error: --profile 3..5: pass a step, e.g. 3, or the first"),
    "a worker without a profile": (["run", "lengths.py", "--worker", "policy"], 2, "--worker names the workers that --profile profiles"),
    "an unknown option": (["plan", "lengths.py", "--drow", "x.svg"], 2, "No such option: --drow"),
    "an unknown key": (["plan", "lengths.py", "cuont=3"], 2, "error: setting 'cuont': Key 'cuont' not in 'Config'. Did you mean: 'count'?"),
    "a picture in no folder": (["plan", "lengths.py", "--draw", "no/x.svg"], 2, "the folder 'no' does not exist; make it first"),
    "an unknown GPU": (
        ["plan", "lengths.py", "--gpus", "2", "--gpu", "H1000"],
        2,
        "'H1000' is not a known kind of GPU; choose one of A100,",
    ),
    "a picture of another kind": (["plan", "lengths.py", "--draw", "x.png"], 2, "error: draw('x.png'): a plan is drawn as .svg or .mmd"),
    "no such run": (["report", "nowhere"], 2, "error: 'nowhere/run.json': there is no recorded run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_line_and_an_exit_code(name: str, recipe: Path) -> None:
    arguments, code, message = REFUSED[name]
    ended = rlgraph(*arguments, cwd=recipe.parent)
    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not ended.stderr.startswith("error:") or len(ended.stderr.splitlines()) == 1


def test_an_error_of_the_recipes_own_code_keeps_its_traceback(recipe: Path) -> None:
    ended = rlgraph("plan", "lengths.py", "count=13", cwd=recipe.parent)
    assert ended.returncode == 1
    assert 'lengths.py", line' in ended.stderr
    assert "ZeroDivisionError: a mistake of the recipe's own" in ended.stderr


def test_an_error_that_ends_a_program_shows_the_users_lines_and_none_of_rlgraphs(tmp_path: Path) -> None:
    program = tmp_path / "own.py"
    program.write_text("import rlgraph as rg\n\n\ndef source():\n    return rg.prompts([], count=2)\n\n\nsource()\n")
    for trace, most in (("0", 7), ("1", 60)):
        ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env={**os.environ, "RLGRAPH_TRACE": trace})
        lines = ended.stderr.splitlines()
        assert lines[-1] == "rlgraph.errors.DataError: prompts: the data set is empty; it needs at least one item"
        assert "    return rg.prompts([], count=2)" in lines
        assert (len(lines) < most, any("items.py" in line for line in lines)) == (True, trace == "1")


NO_RECIPE = {
    "no Config": ("def graph(cfg): ...", "has no dataclass `Config`; a recipe defines"),
    "a Config that is no dataclass": ("class Config: ...\ndef graph(cfg): ...", "has no dataclass `Config`; a recipe defines"),
    "neither": ("x = 1", "has no dataclass `Config` and no function `graph(cfg)`; a recipe defines"),
}


@pytest.mark.parametrize("name", NO_RECIPE)
def test_a_file_that_is_no_recipe_says_what_it_lacks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text, message = NO_RECIPE[name]
    (tmp_path / "other.py").write_text(text)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
        recipes.read(tmp_path / "other.py")


def test_a_recipe_that_is_missing_or_runs_or_returns_nothing_is_named(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="Python file not found"):
        recipes.read(Path("gone.py"))
    recipe.write_text(RECIPE.partition("if __name__")[0].replace("return rg.Graph", "rg.Graph"))
    with pytest.raises(ConfigError, match="has no block"):
        recipes.run(recipe, [])
    found = recipes.read(recipe)
    with pytest.raises(ConfigError, match=r"graph\(cfg\) returned None; a recipe defines"):
        found.graph(found.configured([]))


SEVERAL = {  # recipes that run several graphs one after the other, and their graphs
    "curriculum": ["sft", "one_step_off"],
    "process_rewards": ["judge", "policy"],
    "reasoning": ["fine_tuning", "reinforcement"],
    "teachers": ["sums", "differences", "student"],
    "vision": ["fine_tuning", "reinforcement"],
}
ONE_GRAPH = sorted(path for path in (ROOT / "recipes").glob("*.py") if path.stem not in SEVERAL)


@pytest.mark.parametrize("path", ONE_GRAPH, ids=lambda path: path.stem)
def test_every_recipe_of_one_graph_follows_the_convention(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = recipes.read(path)
    assert found.configured(["steps=3"]).steps == 3


@pytest.mark.parametrize("name", SEVERAL)
def test_the_graphs_of_a_recipe_are_planned_and_drawn_each(name: str, tmp_path: Path) -> None:
    settings = ["model=tiny", "engine=transformers", "--cpus", "2", "--json", "--draw", "plan.svg", "--timeline", "times.json"]
    ended = rlgraph("plan", str(ROOT / "recipes" / f"{name}.py"), *settings, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [plan["graph"] for plan in json.loads(ended.stdout)] == SEVERAL[name]
    drawn = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert drawn == {f"{stem}.{graph}.{ending}" for stem, ending in (("plan", "svg"), ("times", "json")) for graph in SEVERAL[name]}


def test_what_is_for_one_graph_refuses_a_recipe_of_several(recipe: Path) -> None:
    rg.planning.Costs({"prompts": 0.1}).to_file(recipe.parent / "costs.yaml")
    one = RECIPE.partition("if __name__")[0].replace("def graph(cfg)", "def one(cfg)")
    recipe.write_text(f"{one}\ndef graphs(cfg):\n    return [one(cfg)], [2]\n")
    ended = rlgraph("plan", "lengths.py", cwd=recipe.parent)
    assert ended.stdout.startswith("lengths on 2 cores:"), ended.stderr
    for command in (["tune", "lengths.py", "count=4,8"], ["plan", "lengths.py", "--costs", "costs.yaml"]):
        ended = rlgraph(*command, cwd=recipe.parent)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "error: recipe 'lengths.py' has several graphs, by `graphs(cfg)`; this command requires one graph" in ended.stderr
    recipe.write_text(recipe.read_text().replace("return [one(cfg)], [2]", "return [one(cfg)]"))
    ended = rlgraph("plan", "lengths.py", cwd=recipe.parent)
    assert ended.returncode == 2
    assert "graphs(cfg) returned [" in ended.stderr


def test_choices_are_split_at_commas_outside_of_brackets_and_each_is_checked() -> None:
    looked_at: list[list[str]] = []
    fixed, choices = choices_of(["a=1", "b=[1,2],[3]", "c={x:1,y:2}"], lambda settings: looked_at.append(list(settings)))
    assert (fixed, choices) == (["a=1", "c={x:1,y:2}"], {"b": ["[1,2]", "[3]"]})
    assert looked_at == [fixed, [*fixed, "b=[1,2]"], [*fixed, "b=[3]"]]
    with pytest.raises(ConfigError, match="no setting has several values"):
        choices_of(["a=1"], list)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with two runs: the second twice as slow, with another engine."""
    folder = tmp_path_factory.mktemp("runs")
    first = simulate_run(rg.compile(build(depth=1), rg.Cluster(gpus=4)), 12)
    settings = {**first.settings, "generator of rollout": {"path": "some/model", "engine": "other"}, "node judge": {"rows": "4"}}
    second = replace(simulate_run(rg.compile(build(depth=2), rg.Cluster(gpus=4)), 12, scale=2.0), settings=settings)
    for name, run in (("a", first), ("b", second)):
        (folder / name).mkdir()
        run.save(folder / name)
    return folder


def test_compare_shows_measures_and_only_the_settings_that_differ(runs: Path) -> None:
    found = rg.runs.compare(runs / "a", runs / "b", metrics=["actor/entropy"])
    measures = {row.name: row.values for row in found.measures}
    faster, slower = measures["step, median s"]
    assert faster is not None
    assert slower == pytest.approx(2 * faster, rel=0.2)
    assert measures["staleness, bound"] == (1.0, 2.0)
    assert measures["actor/entropy, last 4 steps"][0] == pytest.approx(1.2 - 0.5 * 10 / 60, abs=0.05)
    differing = [(row.where, row.setting, row.values) for row in found.differences]
    assert differing == [("generator of rollout", "engine", ("vllm", "other")), ("node judge", "is there", ("no", "yes"))]
    with pytest.raises(rg.errors.PlanError, match="no run has the metric 'actor/nothing'; did you mean 'actor/entropy'"):
        rg.runs.compare(runs / "a", runs / "b", metrics=["actor/nothing"])


def test_report_and_compare_read_recorded_runs(runs: Path) -> None:
    ended = rlgraph("report", "a", "--out", "page.html", cwd=runs)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "page.html"
    assert (runs / "page.html").read_text().startswith("<!DOCTYPE html>")
    ended = rlgraph("compare", "a", "b", cwd=runs)
    assert (
        ended.stdout == f"{rg.runs.compare(runs / 'a', runs / 'b')}\n".replace(f"{runs}/", "")
        or "generator of rollout: engine" in ended.stdout
    )


def test_report_serves_the_page_of_a_run_until_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "rlgraph", "report", "a", "--watch"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
    own_sigint = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=runs, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=own_sigint) as serving:
        try:
            assert serving.stdout is not None
            url = serving.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert "<title>grpo" in answer.read().decode()
            serving.send_signal(signal.SIGINT)
            assert serving.wait(60) == 0
        finally:
            serving.kill()


def test_export_writes_the_newest_checkpoint(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "tiny"))
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=rg.Sampling(max_tokens=4), dtype="float32")
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    graph = grpo_graph(generator, policy, ITEMS, name="tiny", rewards=odd_tokens, count=2, depth=0)
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    with LocalJob(graph, plan, Checkpoints(graph, plan, Recovery(tmp_path / "checkpoints", 1, 2))) as job:
        assert len(list(job.steps(1))) == 1
    ended = rlgraph("export", "checkpoints", "model", "--dtype", "float32", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "model: after step 1, 92,480 parameters in float32, " in ended.stdout
    rg.runs.export(tmp_path / "checkpoints", tmp_path / "again", "float32")
    written = {path.name: path.read_bytes() for path in (tmp_path / "again").glob("*.safetensors")}
    assert written
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").glob("*.safetensors")} == written
    refused = rlgraph("export", "checkpoints", "model", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_doctor_checks_this_machine_and_its_exit_code_says_whether_there_is_a_problem(tmp_path: Path) -> None:
    ended = rlgraph_anew("doctor", "--json", cwd=tmp_path, ATEN_CPU_CAPABILITY="default")
    checks = {check["name"]: check for check in json.loads(ended.stdout)}
    assert ended.returncode == any(check["state"] == "problem" for check in checks.values())
    assert {"Python", "GPUs", "memory", "/dev/shm", "open files", "sandbox: seccomp", "Ray's port"} <= set(checks)
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")
    assert checks["dtype auto on cores"]["found"].startswith("float32: ")


def test_doctor_says_that_too_few_files_may_be_open(tmp_path: Path) -> None:
    code = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\nfrom rlgraph_cli import main\nmain()"
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "doctor"]
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 1
    assert "problem  open files" in ended.stdout
    assert "fix: ulimit -n 512" in ended.stdout


def test_doctor_knows_a_port_that_is_taken_and_a_path_that_is_too_long() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        check = diagnosis.port_check(taken.getsockname()[1])
    assert (check.state, "is taken" in check.found) == ("warning", True)
    assert [check.state for check in diagnosis.temporary_checks("/tmp")][1:] == []


def test_doctor_tries_bfloat16_and_names_the_limit_that_makes_it_work() -> None:
    assert diagnosis.trial_check(lambda limit: True).state == "ok"
    check = diagnosis.trial_check(lambda limit: limit == "AVX2")
    assert (check.state, "ONEDNN_MAX_CPU_ISA=AVX2" in check.fix) == ("problem", True)
    assert diagnosis.trial_check(lambda limit: False).fix == "give models dtype='float32'"


def test_doctor_compares_versions_with_the_supported_ranges() -> None:
    needed = diagnosis.Requirement("torch>=2.11")
    assert diagnosis.package_check(needed, "2.13.0+cpu").state == "ok"
    assert diagnosis.package_check(needed, "2.13.0.dev20260101").state == "ok"
    assert diagnosis.package_check(needed, "2.10.0").state == "problem"
    assert diagnosis.package_check(needed, "2.10.0", optional=True).state == "warning"
    assert diagnosis.package_check(needed, None).fix == "pip install 'torch>=2.11'"


NVLINK = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tNV18\t0-31\t0
GPU1\tNV18\t X \tSYS\t0-31\t0
GPU2\tNV18\tSYS\t X \t32-63\t1

Legend:
  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_doctor_counts_the_links_of_pairs_of_gpus() -> None:
    check = diagnosis.links_check(NVLINK, 3)
    assert (check.state, check.found) == ("warning", "2 pairs by NV18, 1 pair by SYS")
    assert diagnosis.links_check(NVLINK.replace("SYS\t", "NV18\t"), 3).state == "ok"
    assert diagnosis.links_check("", 3).state == "warning"


def test_help_shows_each_word_of_each_option() -> None:
    """What stands in brackets is markup to rich, which leaves it out."""
    group: Any = typer.main.get_command(app)
    commands = [[name] for name in group.commands] + [["cluster", name] for name in group.commands["cluster"].commands]
    for words in commands:
        shown = " ".join(CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "400", "NO_COLOR": "1"}).output.split())
        command = group.commands[words[0]]
        command = command.commands[words[1]] if len(words) > 1 else command
        said = [each.help for each in command.params if each.help]
        assert [text for text in said if " ".join(text.split()) not in shown] == [], words

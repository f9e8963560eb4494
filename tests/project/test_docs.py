"""What the documents and docstrings show is what there is."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from support.public import PUBLIC, unique_values

import rlgraph as rg
from rlgraph import algorithms

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_USERS = [page for page in PAGES if page.parent.name not in ("developers", "api") and page.stem not in ("architecture", "structure")]
LONG = {"algorithms.md", "benchmarks.md", "prediction.md"}  # a reference, and two pages of measurements
WITH_EXAMPLES = [path for path in sorted(ROOT.glob("rlgraph*/**/*.py")) if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_the_docstrings_run(path: Path) -> None:
    """Of every module with one: none needs vLLM or a GPU, which have their examples in recipes/."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    if ">>> task = rg.scorers.reasoning_gym(" in path.read_text():
        pytest.importorskip("reasoning_gym")  # it needs a C compiler where it is installed
    found = doctest.testmod(module)
    assert found.attempted > 0, "an example that is in no docstring"
    assert found.failed == 0


def without_example(public: Mapping[str, object]) -> list[str]:
    """The public functions whose docstring shows no use of them."""
    return [name for name, found in public.items() if inspect.isfunction(found) and ">>>" not in (found.__doc__ or "")]


def test_every_public_function_has_an_example() -> None:
    assert without_example(PUBLIC) == []
    assert without_example({"bare": lambda: None, "compile": rg.compile}) == ["bare"]


OF_RECIPES: list[Any] = [rg.prompts, rg.reward, rg.evaluate, rg.advantages, rg.feedback, rg.compile, rg.runs.warm, rg.Generator.rollout]
OF_RECIPES += [rg.Policy.log_probs, rg.Policy.base_log_probs, rg.Policy.update, rg.Reference.log_probs, rg.Reference.old_log_probs]
OF_RECIPES += [rg.examples, rg.Critic.values, rg.Critic.update, rg.Plan.launch, rg.Job.steps, rg.Job.export]
OF_RECIPES += [rg.tune, rg.record, rg.runs.watch, rg.runs.export, rg.planning.profile, rg.planning.rehearse]


def without_line(function: Any) -> list[str]:
    """The parameters for which the docstring has no line."""
    lines = " ".join(re.findall(r"^ *\* (`.*?):", function.__doc__ or "", re.M))
    return [name for name in inspect.signature(function).parameters if name != "self" and f"`{name}`" not in lines]


def test_the_functions_that_recipes_call_have_a_line_for_each_parameter() -> None:
    assert {function.__qualname__: names for function in OF_RECIPES if (names := without_line(function))} == {}
    assert without_line(rg.runs.report) == ["run", "path"]


def examples(page: str) -> Iterator[ast.Module]:
    """The blocks of Python that a page shows."""
    yield from (ast.parse(code) for code in re.findall(r"```python\n(.*?)```", page, re.S))


def unknown_names(tree: ast.Module) -> Iterator[str]:
    """The names of rlgraph that an example uses and that there are not."""
    modules = {"rg": rg, "alg": algorithms}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            if not hasattr(modules[node.value.id], node.attr):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).removeprefix("rg.") in rg._SUBJECTS:
            if ast.unparse(node).removeprefix("rg.") not in PUBLIC:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlgraph"):
            module = importlib.import_module(node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name))


def prose(page: Path) -> list[str]:
    """The words of a page outside of its code, tables and comments."""
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.S).splitlines()
    return " ".join(line for line in lines if not line.startswith(("|", "<!--", "    "))).split()


def test_there_are_few_pages_for_users_and_none_is_long() -> None:
    assert len(FOR_USERS) <= 20
    assert {page.name: len(words) for page in FOR_USERS if page.name not in LONG and len(words := prose(page)) > 1500} == {}


MADE = {rg.Plan, rg.Output}  # by the library alone
NAMED = unique_values()
CLASSES = sorted({each for each in NAMED if inspect.isclass(each) and is_dataclass(each)} - MADE, key=str)


@pytest.mark.parametrize("cls", [pytest.param(each, id=each.__name__) for each in CLASSES])
def test_help_of_a_class_names_each_argument_with_a_plain_type(cls: type) -> None:
    said = " ".join(base.__doc__ or "" for base in cls.__mro__)
    assert not [field.name for field in fields(cls) if field.init and not re.search(rf"\b{field.name}\b", said)]
    assert not re.search("Annotated|<factory>", str(inspect.signature(cls)))


def test_the_examples_of_every_page_use_names_that_there_are() -> None:
    assert list(unknown_names(ast.parse("rg.grpo(x)\nfrom rlgraph.columns import Nothing"))) == ["rlgraph.columns.Nothing", "rg.grpo"]
    found = {page.name: names for page in PAGES if (names := [n for tree in examples(page.read_text()) for n in unknown_names(tree)])}
    assert found == {}


def test_the_readme_example_compiles_as_it_stands(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    before_launch, launch = code[1].split("with plan.launch()")
    assert "job.steps(10)" in launch
    lines = [line for line in code[1].splitlines() if line]
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 88
    script = before_launch.replace('"smollm2"', '"tiny"') + "print(plan)"
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert found.returncode == 0, found.stderr
    assert "staleness at most 1" in found.stdout


def test_the_readmes_picture_is_what_is_drawn_today(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "draw.py"), str(tmp_path / "grpo.svg")], check=True, timeout=250)
    assert (tmp_path / "grpo.svg").read_text() == (ROOT / "docs" / "grpo.svg").read_text()


@pytest.mark.stage("recipes")
def test_the_pictures_of_the_recipes_are_what_is_planned_today(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "draw_recipes.py"), str(tmp_path)], check=True, timeout=250)
    held = {path.name: path.read_text() for path in (ROOT / "docs" / "plans").iterdir()}
    changed = sorted(path.name for path in tmp_path.glob("*.svg") if held.pop(path.name, "") != path.read_text())
    assert (changed, list(held)) == ([], []), "recipes or plans have changed: python docs/draw_recipes.py docs/plans"
    shown = re.findall(r"\]\(plans/(\w+\.svg)\)", (ROOT / "docs" / "beyond_rl.md").read_text())
    assert sorted(shown) == sorted(path.name for path in tmp_path.glob("*.svg"))


def test_the_picture_of_the_packages_is_what_is_imported_today(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "architecture.py"), str(tmp_path / "now.svg")], check=True, timeout=250)
    drawn = (tmp_path / "now.svg").read_text() == (ROOT / "docs" / "architecture.svg").read_text()
    assert drawn, "imports have changed: python docs/architecture.py docs/architecture.svg"


def test_the_numbers_of_the_structure_are_those_of_today_and_none_grows(tmp_path: Path) -> None:
    """All but the sizes, which any change changes."""
    subprocess.run([sys.executable, str(ROOT / "docs" / "structure.py"), str(tmp_path / "now.md")], check=True, timeout=250)
    pages = (tmp_path / "now.md", ROOT / "docs" / "structure.md")
    now, then = ([line for line in page.read_text().splitlines() if "lines |" not in line] for page in pages)
    assert now == then, "the structure has changed: python docs/structure.py docs/structure.md"
    cells = [line.strip("| ").rpartition(" | ") for line in now]
    numbers = {what: int(cell) for what, _, cell in cells if cell.isdigit()}
    more = {what: most for what, most in MOST.items() if numbers[what] > most}
    assert not more, "rename or merge what is new; where a number fell, lower it here"


# What may only become less.
MOST = {
    "modules of `rlgraph/` that exactly one module imports": 49,
    "of these, modules that are part of their importer": 0,
    "functions of `rlgraph/` named by a bare participle or adverb": 0,
    "`type: ignore` in `rlgraph/`": 27,
    "`getattr` with a default in `rlgraph/`": 33,
}


# How many files one opens to follow each of these through the code. A file more is one too many to keep in mind.
WALKS = {"How a batch travels": 12, "How the weights travel": 9, "How a graph becomes a plan": 9}


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_through_the_code_visits_few_files_and_each_once(title: str) -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    visited = re.findall(r"^\d+\. `(rlgraph/[\w/]+\.py)`", section, re.M)
    assert len(visited) == len(re.findall(r"^\d+\. ", section, re.M)), "each step of a walk begins with its file"
    assert [path for path in visited if not (ROOT / path).is_file()] == []
    assert len(set(visited)) == len(visited) <= WALKS[title]

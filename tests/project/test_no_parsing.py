"""What rlgraph says is made when it is printed, and nothing reads it back: regular expressions are for the text of others alone."""

import ast
from pathlib import Path

import rlgraph

PACKAGE = Path(rlgraph.__file__).parent
FOREIGN = {  # the text of others that a module reads with regular expressions
    "environments/gymnasium.py": "actions in what a model has said",
    "algorithms/correction.py": "a threshold that a user writes, as verl does",
    "channels/host/slot_memory.py": "names of PyTorch's dtypes",
    "engines/forward/self_test.py": "names of settings in config.json",
    "engines/hf/pretrained.py": "names of models on a hub",
    "engines/fsdp/distributed_checkpoint.py": "paths in a manifest that is read from a disk",
    "engines/hf/export.py": "names of parameters, whose numbers sort as numbers",
    "engines/hf/chat_template.py": "a chat template",
    "engines/hf/model_files.py": "names of models on a hub, and of parameters in a file of weights",
    "curriculum.py": "names of folders that a user writes",
    "nodes/training/learned_reward.py": "what a model has written, in steps",
    "nodes/rewards/code.py": "what a model has written",
    "nodes/rewards/judge.py": "what a model has written, and a header of its server",
    "nodes/rewards/scorers.py": "what a model has written",
    "render/report.py": "names of models on a hub",
    "recording/sinks.py": "names of metrics, by the letters that a sink refuses",
    "nodes/environments/messages.py": "what a model has written",
    "runtime/driver/ray_cluster.py": "commands and logs of Ray",
    "runtime/driver/orphan_cleanup.py": "names of folders and semaphores that Ray leaves",
}


def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_regular_expressions_read_the_text_of_others_alone() -> None:
    using = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(alias.name == "re" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "re")
    }
    assert using <= set(FOREIGN), f"{using - set(FOREIGN)}: carry a value beside the message instead of reading the message"


def test_neither_runtime_nor_planner_looks_for_words_in_a_text() -> None:
    words = {"startswith", "endswith", "partition", "rpartition", "find", "index"}
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if name.startswith(("runtime/", "plan/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in words
        and any(isinstance(argument, ast.JoinedStr) or _sentence(argument) for argument in node.args)
    ]
    assert found == []


def _sentence(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and isinstance(argument.value, str) and " " in argument.value

"""Measure how rlgraph is laid out, one row a number, and write the table.

python docs/structure.py docs/structure.md

It only reads sources: sizes, circles of imports, public names, the files of three walks through the code, names of functions.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx
from architecture import ROOT, import_graph

TITLE = """# Structure

`python docs/structure.py docs/structure.md` measures these numbers and writes this page.
"""

# The files that one opens to follow a thing through the code, in order: those of docs/architecture.md and those between them.
WALKS: Mapping[str, str] = {
    "How a batch travels": """
        nodes/base nodes/rollout/rollout nodes/rollout/decode_loop engines/api values/sampling engines/registry
        engines/vllm/spec engines/vllm/engine runtime/worker/executor runtime/worker/spec channels/api
        channels/host/channel channels/host/protocol channels/host/connection channels/host/slot_memory columns nodes/training/update
        nodes/training/guards engines/fsdp/engine batching/packing batching/cutting engines/forward/head
        engines/hf/backbone engines/forward/packed_attention algorithms/masks algorithms/policy_loss""",
    "How the weights travel": """
        runtime/worker/executor runtime/worker/weight_loops engines/api engines/fsdp/engine engines/fsdp/sharding
        engines/hf/model_files engines/hf/folder_weights channels/weights/shards channels/weights/endpoints channels/api
        channels/host/channel channels/host/protocol channels/host/connection channels/host/slot_memory
        engines/vllm/engine engines/vllm/weights engines/copy_plan""",
    "How a graph becomes a plan": """
        api plan/model_shapes plan/compile plan/placement plan/cluster plan/events plan/schedule plan/roofline plan/costs
        plan/cost_functions plan/estimates plan/play plan/forecast plan/channels plan/memory plan/advice plan/plan""",
}

# Modules with one importer that are no part of it, each with the reason. The others are to be merged into their importers.
SEPARATE: Mapping[str, str] = {
    "rlgraph": "the package itself",
    "rlgraph.algorithms.policy_losses": "the losses of `rg.losses`, apart from the exports of its package",
    "rlgraph.channels.local": "a transport, imported by its name",
    "rlgraph.channels.remote.inward": "the relay on the reader's host; its acceptor imports the relay on the writer's host",
    "rlgraph.comparing": "`rg.runs.compare`",
    "rlgraph.data.schemas": "`rg.data.verl` and the readers of other published schemas",
    "rlgraph.diagnosis": "`rg.runs.doctor`",
    "rlgraph.engines.exact.cpu": "imports vLLM, which the spec does without",
    "rlgraph.engines.exact.diagnosis": "`rlgraph doctor exact`",
    "rlgraph.engines.fsdp.recompute": "activation checkpointing",
    "rlgraph.engines.fsdp.spec": "found by the registry by name",
    "rlgraph.engines.megatron.attention": "imports Megatron-Core, whose classes it derives from",
    "rlgraph.engines.megatron.engine": "imports torch.distributed and Megatron-Core, which the spec does without",
    "rlgraph.engines.megatron.masters": "the float32 weights and ZeRO's owners",
    "rlgraph.engines.sglang.engine": "imports SGLang, which the spec does without",
    "rlgraph.engines.vllm.drafts": "speculative decoding",
    "rlgraph.engines.vllm.gpu_worker": "found by vLLM by name",
    "rlgraph.engines.vllm.mixed_cudagraph_patch": "a patch of vLLM 0.26, to be dropped as one file",
    "rlgraph.engines.vllm.scorer": "imports vLLM, which the spec does without",
    "rlgraph.environments.mcp": "`rg.environments.mcp`",
    "rlgraph.environments.nemo_gym": "`rg.environments.nemo_gym`",
    "rlgraph.environments.openenv": "`rg.environments.openenv`",
    "rlgraph.environments.process": "`rg.environments.process`",
    "rlgraph.environments.reasoning_gym": "`rg.environments.reasoning_gym`",
    "rlgraph.nodes.endpoint": "the HTTP server of chat completions",
    "rlgraph.nodes.environments.supervisor": "runs as a file of its own, with Python's library only",
    "rlgraph.nodes.rewards.code": "`rg.scorers.code`",
    "rlgraph.nodes.rewards.judge": "`rg.scorers.judge`",
    "rlgraph.nodes.rewards.reward_model": "`rg.RewardModel`",
    "rlgraph.nodes.rewards.scorers": "`rg.scorers`",
    "rlgraph.nodes.rollout.dynamic_sampling": "`rg.options.Refill`",
    "rlgraph.nodes.rollout.session_loop": "sessions of agent programs",
    "rlgraph.nodes.rollout.session_tree": "the prefix tree of an agent's calls",
    "rlgraph.nodes.rollout.turn_loop": "conversations of several turns",
    "rlgraph.nodes.training.learned_reward": "`rg.LearnedReward`",
    "rlgraph.nodes.training.reference": "`rg.Reference`",
    "rlgraph.nodes.training.teacher": "`rg.Teacher`",
    "rlgraph.nodes.walls.calls": "the seccomp filter",
    "rlgraph.nodes.walls.child": "a program that runs a model's code",
    "rlgraph.nodes.walls.session": "a program that holds a sandbox between runs",
    "rlgraph.record": "`rg.record`",
    "rlgraph.runtime.checkpoint.offline_export": "imports 800 modules for models that a driver of a job does without",
    "rlgraph.runtime.driver.job": "`rg.Job`",
    "rlgraph.runtime.driver.worker_group": "the connections of workers, and who is to blame",
    "rlgraph.runtime.worker.warm_worker": "imports the executor and unpickles, which the template does not",
    "rlgraph.tuning": "`rg.tune` and `rg.planning.replay`",
    "rlgraph_cli": "the package of the command",
}

# Last words of a name that say neither what a function does nor what it returns, besides regular participles; and nouns that end as these.
IRREGULAR = set(
    re.findall(
        r"\w+",
        """again alike alone anew apart around aside away back before bought broken brought built chosen cut dealt done drawn driven
        elsewhere felt found frozen given gone heard held here hidden home kept known laid left lent lost made meant met offline once own
        paid put ready said seen sent set shown shut spent split spelt still taken there together told took torn twice unknown unsplit
        whole within written wrote""",
    )
)
# First words that say what a function does, whatever follows: `put_back`, `find_shared`; `put` and `cut` are verbs by themselves too.
VERBS = set(
    re.findall(
        r"\w+",
        "begin call choose convert count cut find fire give has init load mark multiply open pad put receive refuse run send set sum",
    )
)
NOUNS = set(
    re.findall(
        r"\w+",
        "chosen embed embedding feed heading mapping need nothing rejected ring seed setting something spelling thinking training",
    )
)


# Names that users write, with the reason why each stays.
PUBLIC = {"preferred": "names the pairs that the node declares, as `pairs` and `rewards` name what theirs do"}


def participle(name: str) -> bool:
    """Whether the name of a function is, or ends in, a bare participle or adverb.

    >>> [name for name in ("made", "_kept_apart", "joined", "build_optimizer", "check_shared", "running") if participle(name)]
    ['made', '_kept_apart', 'joined', 'running']
    """
    words = name.strip("_").split("_")
    last = words[-1]
    if name in PUBLIC or last in NOUNS or words[0] in VERBS or (len(words) > 1 and words[0] in ("check", "filter", "is")):
        return False
    return last in IRREGULAR or (len(last) > 3 and last.endswith("ed")) or (len(words) == 1 and len(last) > 4 and last.endswith("ing"))


def circles(graph: "nx.DiGraph[str]") -> list[int]:
    """Measure the circles of modules that import each other, the largest first."""
    return sorted((len(found) for found in nx.strongly_connected_components(graph) if len(found) > 1), reverse=True)


def modules(*, types: bool) -> "nx.DiGraph[str]":
    """Read which module imports which, imports inside functions included, and with `types` those for the type checker too."""
    found = import_graph(types=types)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(name for name in found.modules if name.startswith("rlgraph"))
    graph.add_edges_from((name, other) for name in [*graph] for other in found.find_modules_directly_imported_by(name) if other in graph)
    return graph


def single_importers(graph: "nx.DiGraph[str]") -> set[str]:
    """Find the modules that exactly one module imports. Raises SystemExit if SEPARATE names another."""
    found = {name for name, degree in graph.in_degree() if degree == 1}
    if others := sorted(SEPARATE.keys() - found):
        raise SystemExit(f"docs/structure.py: SEPARATE names {others}, which none or several import; remove them from it")
    return found


def walk_length(title: str, graph: "nx.DiGraph[str]") -> int:
    """Count the files of a walk. Raises SystemExit for one that does not exist, or is joined by no import to one before it."""
    where = f"docs/structure.py: {title}"
    before: list[str] = []
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    missing = {*re.findall(r"^\d+\. `rlgraph/([\w/]+)\.py`", section, re.M)} - {*WALKS[title].split()}
    if missing:
        raise SystemExit(f"{where}: docs/architecture.md also visits {sorted(missing)}; add them to WALKS")
    for file in WALKS[title].split():
        module = "rlgraph." + file.replace("/", ".")
        if module not in graph:
            raise SystemExit(f"{where}: rlgraph/{file}.py does not exist; name in WALKS the file that took its place")
        if before and not any(graph.has_edge(module, other) or graph.has_edge(other, module) for other in before):
            raise SystemExit(f"{where}: no import joins rlgraph/{file}.py to a file before it; add the file between them")
        before.append(module)
    return len(before)


def rows() -> Iterator[tuple[str, str]]:
    """Yield the rows of the table."""
    for folder in ("rlgraph", "tests", "benchmarks"):
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
        yield f"`{folder}/`: modules, lines", f"{len(texts):,}, {sum(text.count(chr(10)) for text in texts):,}"
    runs, types = modules(types=False), modules(types=True)
    single = single_importers(runs)
    yield "modules of `rlgraph/` that exactly one module imports", str(len(single))
    yield "of these, modules that are part of their importer", str(len(single - SEPARATE.keys()))
    for what, graph in ("", runs), (", imports for types counted", types):
        found_circles = circles(graph)
        yield f"circles of imports{what}: number, modules of the largest", f"{len(found_circles)}, {max(found_circles, default=0)}"
    names, places = public_names()
    yield "public names of `import rlgraph`, and places where each is written", f"{names}, {places}"
    for title in WALKS:
        yield f"files to open: {title[0].lower()}{title[1:]}", str(walk_length(title, runs))
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "rlgraph").rglob("*.py"))]
    found = [node for source in sources for node in ast.walk(ast.parse(source))]
    named = [node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__")]
    yield "functions of `rlgraph/` named by a bare participle or adverb", str(sum(map(participle, named)))
    yield "`type: ignore` in `rlgraph/`", str(sum(len(re.findall(r"# type: ignore\b", source)) for source in sources))
    gets = [node for node in found if isinstance(node, ast.Call) and len(node.args) == 3 and ast.unparse(node.func) == "getattr"]
    yield "`getattr` with a default in `rlgraph/`", str(len(gets))


def public_names() -> tuple[int, int]:
    """Count the public names, and how often `__init__.py` and `__init__.pyi` write the one they write most often."""
    texts = [(ROOT / "rlgraph" / file).read_text(encoding="utf-8") for file in ("__init__.pyi", "__init__.py")]
    names = [alias.asname for node in ast.parse(texts[0]).body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname]
    # `import X as X` of the stub is one place; a text "X" another.
    written = [sum(len(re.findall(rf"import (?:\w+ as )?{name}$|[\"']{name}[\"']", text, re.M)) for text in texts) for name in names]
    return len(names), max(written)


def page() -> str:
    """Write the page."""
    return "\n".join([TITLE, "| what | now |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows()), ""])


if __name__ == "__main__":
    text = page()
    print(text)
    Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "structure.md").write_text(text, encoding="utf-8")

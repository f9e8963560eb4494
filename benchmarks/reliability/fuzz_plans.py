"""Graphs that nobody would write, compiled and shown: strange names, costs, pools and clusters, from a seed.

    python benchmarks/reliability/fuzz_plans.py [--cases 10000] [--seed 0] [--json PATH]

Each case either ends in an error of rlgraph, of at most three lines and 1,000 characters, or in a plan that can be printed, drawn, saved
and read back, whose seconds are finite and not negative, and whose pools are busy for at most all of the time. A case of at most 50 nodes
and 64 GPUs takes at most 5 s of a core. The first lines of each fault name the seed of its case: `--only SEED` runs it alone, with its
traceback.
"""

import json
import math
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from rich.progress import track
from support.random_graphs import Nothing

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Output, declare

LIMIT_S, SMALL_NODES, SMALL_GPUS, HANG_S = 5.0, 50, 64, 300
ERROR_LINES, ERROR_LETTERS = 3, 1000
STRANGE_NAMES = ("", " ", "a" * 300, "é" * 40, "名前", "\ud83d", "../../etc", "a\nb", "<b>&\"'", "{{x}}", "%s", "\x00", "🙂" * 9, "|")
STRANGE_NUMBERS: tuple[Any, ...] = (0, -1, -0.0, 1e-300, 1e12, 10**400, 10**5000, math.nan, math.inf, -math.inf, "1", None, True, [], 1.5)


def plain_or_strange(chance: random.Random, plain: Callable[[], Any], strange: tuple[Any, ...], rate: float) -> Any:
    return chance.choice(strange) if chance.random() < rate else plain()


def drawn(
    chance: random.Random,
) -> tuple[Callable[[], Graph], Callable[[], rg.Cluster], Callable[[Graph], rg.planning.Costs | None], int, int]:
    """Draw how to make a graph, its cluster and its costs, and the count of nodes and GPUs that it has."""
    odd_names, odd_counts, odd_costs = (chance.choice([0.0, 0.0, 0.03, 0.2]) for _ in range(3))  # how many are strange
    count = chance.choice([1, 3, 6, 12, 40, 40, 200, 500]) if chance.random() < 0.3 else chance.randint(1, 12)
    gpus = chance.choice([0, 0, 1, 2, 3, 8, 16, 64, 512, 4096])
    pools = chance.randint(1, max(1, min(count, 5)))

    def number(plain: Callable[[], Any], rate: float = odd_counts / 4) -> Any:
        return plain_or_strange(chance, plain, STRANGE_NUMBERS, rate)

    def seconds(plain: Callable[[], Any]) -> Any:
        return number(plain, odd_costs / 4)

    def name(plain: str) -> Any:
        return plain_or_strange(chance, lambda: plain, STRANGE_NAMES, odd_names)

    def pool(index: int) -> rg.Pool:
        kind = chance.choice(["open", "open", "share", "gpus"] if gpus else ["open", "share"])
        size = {"share": number(lambda: chance.randint(1, 4))} if kind == "share" else {"gpus": number(lambda: max(gpus // pools, 1))}
        return rg.Pool(name(f"pool {index}"), **({} if kind == "open" else size))

    def graph() -> Graph:
        made_pools = [pool(index) for index in range(pools)]
        models = [Model(name(f"model {index}"), pool=made_pools[index % pools]) for index in range(chance.randint(2, 5))]
        depth = number(lambda: chance.randint(0, 4) if pools > 1 else 0)
        weights = rg.feedback(name("weights"), depth=depth, buffers=number(lambda: chance.randint(1, 2) if depth else 1))
        rows = number(lambda: chance.choice([1, 8, 8, 64, 1024]))
        source = Output(declare(name("prompts"), Nothing(), (), reads=(), writes=("prompts",), rows=rows))
        chunks = number(lambda: chance.choice([1] * 9 + [2, 4]))
        of_weights = {"model": models[0], "feedback": weights, "chunks": chunks}
        made = [Output(declare(name("rollout"), Nothing("generate"), (source,), reads=("prompts",), writes=("c0",), **of_weights))]
        for index in range(1, count):
            inputs = chance.sample(made[-20:], chance.randint(1, min(3, len(made[-20:]))))
            model = chance.choice([None, *models])
            operation = Nothing("host" if model is None else "forward", by_group=chance.random() < 0.5)
            reads = tuple(each.columns[0] for each in inputs)
            made.append(Output(declare(name(f"node {index}"), operation, inputs, reads=reads, writes=(f"c{index}",), model=model)))
        read = made if chance.random() < 0.8 else made[:1]
        update = declare(name("update"), Nothing("train"), read, reads=tuple(each.columns[0] for each in read), writes=(), model=models[1])
        if chance.random() < 0.97:
            weights.close(Output(update, "weights"))
        return Graph(name("graph"), Output(update, "metrics"))

    def cluster() -> rg.Cluster:
        if not gpus:
            return rg.Cluster(cpus=number(lambda: chance.choice([1, 2, 8, 128])), hosts=number(lambda: chance.choice([1, 1, 2])))
        return rg.Cluster(gpus=number(lambda: gpus), cpus=number(lambda: 16 * gpus), gpus_per_node=number(lambda: chance.choice([1, 4, 8])))

    def costs(of: Graph) -> rg.planning.Costs | None:
        if chance.random() < 0.1:
            return None
        scale = chance.choice([1.0, 1.0, 1e-6, 1e6, 1e12])
        nodes = {node.name: seconds(lambda: chance.choice([0.0, chance.random() * scale])) for node in of.nodes}
        if chance.random() < odd_costs:
            nodes.pop(next(iter(nodes)))
        return rg.planning.Costs(nodes, publish_s=seconds(chance.random), receive_s=seconds(chance.random), swap_s=seconds(chance.random))

    return graph, cluster, costs, count, gpus


def wrong_numbers(found: Any, path: str = "") -> list[str]:
    """List the numbers of a value of JSON that are no finite number, or negative seconds, or more busy than all of the time."""
    if isinstance(found, Mapping):
        return [wrong for key, value in found.items() for wrong in wrong_numbers(value, f"{path}.{key}")]
    if isinstance(found, list):
        return [wrong for value in found for wrong in wrong_numbers(value, path)]
    if not isinstance(found, float):
        return []
    negative, too_busy = path.endswith("_s") and found < 0, path.endswith("busy") and found > 1 + 1e-9
    return [f"{path} is {found}"] if not math.isfinite(found) or negative or too_busy else []


def shown(plan: rg.Plan, folder: Path) -> list[str]:
    """Print, draw, save and read back a plan; list what is wrong with its numbers."""
    printed, text = str(plan), plan.to_json()
    plan.draw(folder / "plan.svg")
    if rg.Plan.from_json(text).to_json() != text:
        return ["another plan is read from its JSON"]
    if found := re.search(r".*\b(nan|inf)\b.*", printed):
        return [f"it prints {found[0]!r}"]
    return wrong_numbers(json.loads(text))


def outcome(seed: int, folder: Path) -> tuple[str, str]:
    """Run a case: the kind of its outcome, and what is wrong, if anything is."""
    graph, cluster, costs, nodes, gpus = drawn(random.Random(seed))
    since = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        made = graph()
        wrong = shown(rg.compile(made, cluster(), costs(made)), folder)
    except rg.RlgraphError as error:
        text = str(error)
        long = len(text) > ERROR_LETTERS or text.count("\n") >= ERROR_LINES
        return (f"refused: {type(error).__name__}", f"an error of {len(text)} letters: {text[:300]}" if long else "")
    except Exception as error:  # noqa: BLE001 (any but rlgraph's is a fault)
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "raised", f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took_s = time.process_time() - since
    if nodes <= SMALL_NODES and gpus <= SMALL_GPUS and took_s > LIMIT_S:
        wrong.append(f"{took_s:.1f} s for {nodes} nodes on {gpus} GPUs")
    return "planned", "; ".join(wrong[:3])


def hung(*_: object) -> None:
    raise TimeoutError(f"no end after {HANG_S} s")


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("--cases", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", type=int, help="run this case alone, and let its error through")
    arguments.add_argument("--work", type=Path, default=Path("runs/fuzz_plans"), help="folder of drawings")
    given = arguments.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, hung)
    if given.only is not None:
        graph, cluster, costs, _, _ = drawn(random.Random(given.only))
        made = graph()
        print(shown(rg.compile(made, cluster(), costs(made)), given.work))
        return
    kinds, faults, longest = Counter[str](), dict[int, str](), (0.0, 0)
    for seed in track(range(given.seed, given.seed + given.cases), "graphs"):
        since = time.process_time()
        kind, fault = outcome(seed, given.work)
        kinds[kind] += 1
        longest = max(longest, (time.process_time() - since, seed))
        if fault:
            faults[seed] = fault
            print(f"seed {seed}: {fault}".encode("ascii", "backslashreplace").decode(), flush=True)
    print(f"{given.cases} graphs: {dict(kinds)}; {len(faults)} faults; the longest took {longest[0]:.1f} s (seed {longest[1]})")
    if given.json:
        found = {"cases": given.cases, "seed": given.seed, "outcomes": kinds, "faults": faults, "longest_s": longest[0]}
        write(given.json, found)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

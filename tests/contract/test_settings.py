"""Every value that a user gives is checked where it is declared: each field of each public dataclass, each plain parameter."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.public import PUBLIC, unique_values

import rlgraph as rg
from rlgraph import algorithms, settings
from rlgraph.errors import ConfigError, GraphError, RlgraphError, show_value
from rlgraph.graph.nodes import Due, Output
from rlgraph.nodes.base import checked_metrics
from rlgraph.nodes.environments.tools import Python, Tool
from rlgraph.nodes.rewards.scorers import reasoning_gym
from rlgraph.nodes.sandbox import Limits
from rlgraph.nodes.training.update import UpdateSchedule
from rlgraph.plan.cost_functions import Decode, NodeCost, Setting, SleepCost
from rlgraph.plan.lengths import Lengths
from rlgraph.plan.plan import Plan
from rlgraph.runtime.checkpoint.store import difference
from rlgraph.runtime.local import LocalJob
from rlgraph.tuning import deeper

LONG = "x" * 10**5
POOL = rg.Pool("p")
QUESTIONS = [{"prompt": "1 + 1 =", "answer": "2"}]


async def search(query: str) -> str:
    return query


async def asks(client: rg.agents.AgentClient) -> float:
    return 0.0


def right(responses: list[str]) -> list[float]:
    return [0.0] * len(responses)


class Answers:
    async def reset(self) -> None: ...

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        return rg.agents.Turn(done=True)

    async def close(self) -> None: ...


NEEDED: dict[type, dict[str, Any]] = {  # the fields without a default
    rg.Pool: {"name": "p"},
    rg.extend.Model: {"path": "m", "pool": POOL},
    rg.Generator: {"path": "m", "pool": POOL},
    rg.Policy: {"path": "m", "pool": POOL},
    rg.Critic: {"path": "m", "pool": POOL},
    rg.Reference: {"path": "m", "pool": POOL},
    rg.RewardModel: {"path": "m", "pool": POOL},
    rg.Teacher: {"path": "m", "pool": POOL},
    rg.LearnedReward: {"path": "m", "pool": POOL},
    rg.LoRA: {"rank": 4},
    rg.extend.EngineSpec: {"name": "mine", "load": right},
    rg.extend.TrainerSpec: {"name": "mine", "load": right},
    rg.options.Refill: {"reward": right},
    rg.Tools: {"tools": (search,)},
    rg.Agent: {"environment": Answers},
    rg.Program: {"run": asks},
    rg.agents.AgentClient: {"base_url": "http://127.0.0.1/v1", "key": "k"},
    rg.agents.Executed: {"output": ""},
    rg.agents.Message: {"role": "user", "content": ""},
    rg.agents.ToolCall: {"name": "search"},
    rg.planning.Costs: {"nodes": {"rollout": 1.0}},
    rg.optim.Linear: {"steps": 9},
    rg.optim.Cosine: {"steps": 9},
    rg.optim.WSD: {"steps": 9, "decay_steps": 2},
    algorithms.DRO: {"beta": 0.1},
    algorithms.OverlongPenalty: {"max_tokens": 8, "buffer_tokens": 2},
    algorithms.Rejection: {"statistic": "token_k1", "high": 2.0},
    rg.planning.Profile: {"steps": 1},
    rg.planning.Precision: {"dtype": "float32", "why": ""},
    Due: {"every": 1},
    Tool: {"name": "search", "function": search},
    Lengths: {"at": (0, 1), "tokens": (1, 2)},
}
BEHIND = (Due, UpdateSchedule, Limits, Python, Tool, Decode, NodeCost, Setting, SleepCost, Lengths)  # what public ones are made of
RESULTS = (Plan, algorithms.Totals, rg.extend.Context, rg.Output)  # made by the library
TRAITS = (
    rg.extend.NodeTraits,
    rg.extend.ModelTraits,
)  # of operations and models of a developer: objects of any kind, which a type checker holds


def public_dataclasses() -> list[type]:
    exported = unique_values()
    found = [
        value for value in exported if isinstance(value, type) and dataclasses.is_dataclass(value) and value not in (*RESULTS, *TRAITS)
    ]
    return sorted({*found, *BEHIND} - {cls for cls in found if inspect.isabstract(cls)}, key=lambda cls: cls.__name__)


FIELDS = [(cls, f.name) for cls in public_dataclasses() for f in dataclasses.fields(cls) if f.init]


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name in FIELDS])
def test_every_field_of_every_public_dataclass_refuses_what_it_cannot_be(cls: type, name: str) -> None:
    where = re.escape(f"{cls.__name__}({name}=")
    if cls is rg.planning.Costs and name == "nodes":
        where = r"the cost of 'nodes'|Costs\(nodes="
    with pytest.raises(RlgraphError, match=where):
        cls(**{**NEEDED.get(cls, {}), name: object()})


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name.rpartition(".")[2]: value for name, value in PUBLIC.items() if inspect.isfunction(value) and not name.startswith("algorithms.")
    },
    **{f"data.{name}": value for name, value in vars(rg.data).items() if name in rg.data.__all__ and inspect.isfunction(value)},
    "Graph": rg.Graph.__init__,
    "Generator.rollout": rg.Generator.rollout,
    "Policy.update": rg.Policy.update,
    "Policy.log_probs": rg.Policy.log_probs,
    "Critic.update": rg.Critic.update,
    "Critic.values": rg.Critic.values,
    "Reference.log_probs": rg.Reference.log_probs,
    "Reference.old_log_probs": rg.Reference.old_log_probs,
    "RewardModel.rewards": rg.RewardModel.rewards,
    "Teacher.log_probs": rg.Teacher.log_probs,
    "Teacher.top_log_probs": rg.Teacher.top_log_probs,
    "LearnedReward.rewards": rg.LearnedReward.rewards,
    "LearnedReward.update": rg.LearnedReward.update,
    "LearnedReward.step_rewards": rg.LearnedReward.step_rewards,
    "Plan.launch": Plan.launch,
    "LocalJob.steps": LocalJob.steps,
}
OWN = {  # parameters that the function checks by itself, since their annotation names no class: protocols, and any object
    *(
        ("prompts", "data"),
        ("examples", "data"),
        ("pairs", "data"),
        ("stepwise", "data"),
        ("evaluate", "data"),
        ("data.rows", "data"),
        ("data.stream", "source"),
        ("advantages", "estimator"),
        ("shaped_rewards", "by"),
        ("record", "job"),
        ("run", "graphs"),
    ),
    *(("Policy.update", "loss"), ("Critic.update", "loss"), ("Generator.rollout", "refill"), ("rollout_correction", "weights")),
    *(
        ("config", "cls"),
        ("declare", "inputs"),
        ("config", "arguments"),
        ("node", "reads"),
        ("node", "writes"),
        ("node", "by_group"),
        ("node", "trial"),
        ("replay", "trace"),
    ),
    *(("local_cluster", name) for name in inspect.signature(rg.local_cluster).parameters),
    *(("model_folder", name) for name in inspect.signature(rg.model_folder).parameters),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_of_every_public_function_is_checked(name: str) -> None:
    function = FUNCTIONS[name]
    unchecked = {key for key, kind in settings.parameters_of(function).items() if kind is None or not hasattr(function, "__wrapped__")}
    assert {key for key in unchecked if (name, key) not in OWN} == set()


def made(**given: Any) -> rg.Generator:
    return rg.Generator("m", **{"pool": POOL, **given})


def test_equivalent_values_are_converted_to_the_type() -> None:
    sampling = rg.Sampling(max_tokens=np.int64(8), temperature=np.float32(0.5), stop_token_ids=[np.int32(2), torch.tensor(3)])  # type: ignore[arg-type]
    assert sampling == rg.Sampling(max_tokens=8, temperature=0.5, stop_token_ids=(2, 3))
    assert type(sampling.max_tokens) is int
    assert type(sampling.temperature) is float
    assert rg.AdamW(betas=[0.9, 0.95]).betas == (0.9, 0.95)  # type: ignore[arg-type]
    assert rg.feedback("w", depth=np.int64(1)).depth == 1
    assert rg.prompts(QUESTIONS, np.int64(4)).node.rows == 4
    assert rg.Cluster(gpus=np.int64(2)).gpus == 2
    assert algorithms.GRPO(normalize_std=np.bool_(False)).normalize_std is False


def test_an_unknown_setting_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(GraphError, match=r"Sampling\(best_of=2\): there is no setting 'best_of'; the settings are max_tokens, "):
        rg.Sampling(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(GraphError, match="did you mean 'recompute'"):
        rg.Policy("tiny", pool=rg.Pool("train"), recompte=True)  # type: ignore[call-arg]


HUGE: dict[str, tuple[Any, str]] = {
    "text": ("x" * 10**7, "10000000 characters"),
    "a list": ([{"prompt": "x" * 1000}] * 10**5, "… 100000 items"),
    "a mapping": (dict.fromkeys(range(1000), "x" * 1000), "… 1000 items"),
    "a tensor": (torch.zeros(1000, 1000), "a Tensor [1000, 1000] of torch.float32"),
    "bytes": (b"x" * 10**6, "1000000 bytes"),
    "deep": (reduce(lambda inner, _: [inner], range(5000), 1), "[[[[[…]]]]]"),
    "nested": ([[["x" * 1000] * 1000] * 1000] * 1000, "… 1000 items"),
    "a dataclass": (rg.Sampling(stop_token_ids=tuple(range(10**5))), "Sampling(stop_token_ids=(0, 1, 2, … 100000 items))"),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_value_in_a_message_is_short_on_one_line(name: str) -> None:
    value, words = HUGE[name]
    assert words in show_value(value)
    assert len(show_value(value)) < 160
    assert "\n" not in show_value(value)


def test_a_value_that_cannot_be_printed_is_named_by_its_class() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise ValueError("no")

    assert show_value(Shy()) == "a Shy that cannot be printed (ValueError)"
    assert show_value(object()) == "an object"
    assert show_value(Output) == "the class Output"


@pytest.mark.parametrize(
    "make",
    [
        lambda: algorithms.GDPO(keys=(LONG, LONG)),
        lambda: algorithms.GDPO(keys=tuple(map(str, range(10_000))), weights=(1.0,)),
        lambda: algorithms.Rejection.from_verl(LONG, 2.0),
        lambda: reasoning_gym("chain_sum", size=1, instruction=LONG),
        lambda: rg.Agent(LONG),
        lambda: rg.Agent(Answers, calls=LONG),
        lambda: rg.Tools([LONG], pool=rg.Pool("tools", cpus=1)),
        lambda: checked_metrics("score", {LONG: LONG}),
        lambda: deeper(None, LONG),
    ],
)
def test_an_error_never_shows_a_long_value_whole(make) -> None:
    with pytest.raises(RlgraphError) as error:
        make()
    assert len(str(error.value)) < 600


def test_a_difference_of_two_runs_is_printed_in_short() -> None:
    told = difference({"data": "a" + LONG}, {"data": "b" + LONG})
    assert told.startswith("'data' was 'axx")
    assert len(told) < 300


@dataclasses.dataclass
class Texts:
    name: str = "a"
    more: list[str] = dataclasses.field(default_factory=list)
    limit: int | None = None


@pytest.mark.parametrize("text", ["007", "on", "1e3", "1_0"])
def test_a_text_setting_is_the_text_as_it_is_written_or_an_error(text: str, tmp_path: Path) -> None:
    assert rg.config(Texts, [f"name={text}", "limit=3"]) == Texts(text, limit=3)
    assert rg.config(Texts, ["name="]) == Texts("")
    file = tmp_path / "settings.yaml"
    file.write_text(f"name: '{text}'\nmore: ['{text}']\n")
    assert rg.config(Texts, [f"config={file}"]) == Texts(text, [text])
    for wrong in (f"name: {text}\n", f"more: [{text}]\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"setting '(name|more\[0\])' is text, but YAML reads .* there: put it in quotes"):
            rg.config(Texts, [f"config={file}"])


def test_every_class_of_settings_lists_its_settings_for_an_unknown_one() -> None:
    given = {
        "Output",
        "Plan",
        "Costs",
        "Executed",
        "AgentClient",
        "Model",
        "ModelTraits",
        "NodeTraits",
        "NodeCost",
        "Precision",
    }  # not users'
    classes = [getattr(module, name) for module in (rg, rg.algorithms) for name in module.__all__]
    plain = [c.__name__ for c in classes if isinstance(c, type) and dataclasses.is_dataclass(c) and not hasattr(c.__init__, "__wrapped__")]
    assert {name for name in plain if name not in given} <= {"ReMax", "StepwiseLoss", "Totals", "WholeLoss"}, (
        "decorate it by refuse_unknown"
    )


def test_an_unknown_name_says_which_was_meant_and_what_there_is(tmp_path: Path) -> None:
    from pyarrow import Table
    from pyarrow import parquet as files

    file = tmp_path / "train.parquet"
    files.write_table(Table.from_pylist([{"messages": "1 + 1 =", "answer": "2"}]), file)
    unknown: dict[str, Callable[[], object]] = {
        "did you mean 'messages'? Its columns are messages, answer": lambda: rg.data.parquet(file, prompt="mesages"),
        "did you mean 'answers'? There are prompt_texts, prompt_ids, answers": lambda: rg.reward(
            lambda anwers: anwers, rg.prompts([{"prompt": "1", "answer": "1"}], 1)
        ),
        "did you mean 'group_size'? Its arguments are ": lambda: made().rollout(rg.prompts(QUESTIONS, 1), groups_size=2),  # type: ignore[call-arg]
        "did you mean 'max_tokens'? The settings are ": lambda: rg.Sampling(max_new_tokens=2),  # type: ignore[call-arg]
    }
    for words, make in unknown.items():
        with pytest.raises((RlgraphError, TypeError)) as caught:
            make()
        assert words in str(caught.value)


def test_arguments_come_before_files_later_files_before_earlier_ones_and_files_before_defaults(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("name: b\nlimit: 1\nmore: [x]\n")
    second.write_text("limit: 2\n")
    assert rg.config(Texts, ["name=c", f"config={first}", f"config={second}"]) == Texts("c", ["x"], 2)

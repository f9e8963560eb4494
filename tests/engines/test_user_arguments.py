"""Arguments that a user hands on to vLLM: what is the user's, what is rlgraph's, and where it is seen."""

from typing import Any

import pytest

import rlgraph as rg
from rlgraph.analysis.words import graph_settings
from rlgraph.engines.vllm.arguments import arguments, check_arguments, known_arguments, of_model
from rlgraph.errors import GraphError, PlanError

FREE = {"block_size", "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens", "async_scheduling"}
FREE |= {"attention_backend", "compilation_config"}


def generator(**given: Any) -> rg.Generator:
    return rg.Generator("m", pool=rg.Pool("p"), engine_args=given)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_rlgraph_gives_to_vllm_is_either_free_or_refused_by_name(on_cpu: bool) -> None:
    machine = arguments(on_cpu=on_cpu, context=64, max_sequences=8, kv_cache_bytes=None, share=0.9, shared=False)
    given = {**machine, **of_model("m", 64, "float32", 0, 2, random_weights=False)}
    for name, value in given.items():
        if name in FREE:
            check_arguments({name: value})
        else:
            with pytest.raises(GraphError, match=f"'{name}' cannot be given here: "):
                check_arguments({name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_batched_token": 1}, "vLLM has no argument 'max_num_batched_token'; did you mean 'max_num_batched_tokens'.$"),
        ({"max_model_len": 64}, r"Generator\(engine_args={'max_model_len': 64}\): .* set Generator\(max_context=\)$"),
        ({"quantization": "fp8"}, "must be the model's$"),
        ({"scheduler_cls": "mine.Scheduler"}, "rlgraph drives the engine itself and sets it$"),
        ({"pipeline_parallel_size": 2}, "the plan gives each engine its devices"),
        ({"speculative_config": {"method": "ngram"}}, "set Generator\\(drafts=rg.options.PromptLookup"),
        ({"enforce_eager": "yes"}, "'enforce_eager' of vLLM is True or False$"),
        ({"max_num_batched_tokens": 0.5}, "'max_num_batched_tokens' of vLLM is a whole number or None$"),
        ({"additional_config": {"a": {1, 2}}}, "the value is data"),
        ({"enable_expert_parallel": True}, "an engine on one GPU has all experts; leave it out, or set tensor_parallel$"),
    ],
)
def test_an_argument_that_cannot_be_given_is_an_error_where_it_is_declared(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        generator(**given)


def test_the_arguments_of_vllm_are_read_without_importing_it() -> None:
    assert known_arguments()["enforce_eager"] == "bool"


def test_arguments_stand_in_the_plan_and_in_the_settings_of_a_run() -> None:
    graph, plan = planned(rg.Cluster(gpus=2), max_num_batched_tokens=4096)
    assert "engine_args\n" in str(plan)
    assert '{"max_num_batched_tokens": 4096}' in str(plan)
    settings = graph_settings(graph, plan)
    assert settings["generator of rollout"]["engine_args"] == '{"max_num_batched_tokens": 4096}'


def test_an_argument_for_gpus_is_refused_on_host_cores() -> None:
    planned(rg.Cluster(gpus=2), enable_chunked_prefill=True)
    with pytest.raises(PlanError, match=r"model of node 'rollout' has engine_args with 'enable_chunked_prefill', but it runs on the host"):
        planned(rg.Cluster(cpus=4), enable_chunked_prefill=True)


def planned(cluster: rg.Cluster, **given: Any) -> tuple[rg.Graph, rg.Plan]:
    rollout = generator(**given).rollout(rg.prompts([{"prompt": "?"}], count=2))
    graph = rg.Graph("given", rg.reward(lambda response_mask: [0.0], rollout))
    return graph, rg.compile(graph, cluster)

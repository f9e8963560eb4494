"""The rows of what is predicted, beside what was measured or published."""

from figures import Each, count, ms, percent, seconds, share, times
from table import Row

PREDICTED = "prediction_cpu.json"
JOINED = "joined_rollout.json"
CONFIGURATIONS = {"count": count(PREDICTED, "configurations", Each(), "name", reduce="count")}
ACCURATE = [
    Row("a step predicted before the run, {count} configurations: median error", percent(PREDICTED, "median_error"),
        "benchmarks/prediction.py", "worst", percent(PREDICTED, "worst_error"), CONFIGURATIONS),
    Row("pairs of a synchronous and an asynchronous way whose faster one was predicted", count(PREDICTED, "signs_right"),
        "benchmarks/prediction.py", "pairs", count(PREDICTED, "signs")),
    Row("of these, pairs that the synchronous way wins", count(PREDICTED, "signs_right_where_async_loses"),
        "benchmarks/prediction.py", "pairs", count(PREDICTED, "signs_where_async_loses")),
    Row("measured step of the plan predicted to be best, over that of the best, worst of all works",
        times(PREDICTED, "predicted best over measured best", form="{:.3f}", reduce="max"), "benchmarks/prediction.py"),
    Row("a batch of vLLM on an H200 where batches or weights join, from its seconds batch by batch alone, {count} ways: median error",
        percent(JOINED, "rollout_h200.json", "median_error"), "benchmarks/joined_rollout.py",
        "worst", percent(JOINED, "rollout_h200.json", "worst_error"),
        {"count": count(JOINED, "rollout_h200.json", "ways", Each(), "way", reduce="count")}),
    Row("the same of a tiny model on two cores, all time given to decode steps",
        percent(JOINED, "rollout_cpu.json, steps alone", "median_error"),
        "benchmarks/joined_rollout.py", "worst", percent(JOINED, "rollout_cpu.json, steps alone", "worst_error")),
    Row("published synchronous step over that predicted from its published stages, farthest of all",
        share("seed_tables.json", "rows", Each({"kind": "sync"}), "ratio", form="{:.3f}", reduce="farthest from 1"),
        "benchmarks/seed_tables.py", "rows", count("seed_tables.json", "rows", Each({"kind": "sync"}), "ratio", reduce="count")),
    Row("the same of asynchronous steps", share("seed_tables.json", "rows", Each({"kind": "async"}), "ratio", form="{:.3f}",
        reduce="farthest from 1"), "benchmarks/seed_tables.py",
        "rows", count("seed_tables.json", "rows", Each({"kind": "async"}), "ratio", reduce="count")),
    Row("period of the plan chosen by `rg.tune` over the best of all plans, 2 to 16 GPUs, at most",
        share("tune.json", "worst_apart", form="1 + {:.0e}"), "benchmarks/tune.py"),
    Row("a step estimated where nothing was measured, over or under the one it took on H200s, {runs} runs held out: median factor",
        share("a_priori_h200.json", "median_factor_held_out"), "benchmarks/a_priori.py",
        "worst", share("a_priori_h200.json", "worst_factor_held_out"), {"runs": count("a_priori_h200.json", "held_out")}),
    Row("`rg.tune` of {plans} plans", seconds("tune.json", "tune_s", "median"), "benchmarks/tune.py",
        words={"plans": count("tune.json", "tune_s", "candidates")}),
    Row("`rg.compile` of 20 nodes", ms("tune.json", "compile_20_nodes_s", "median"), "benchmarks/tune.py"),
]  # fmt: skip

"""The rows of what is predicted, beside what was measured or published."""

from benchmarks.lib.figures import Each, count, ms, percent, seconds, share, times
from benchmarks.report.table import Row

PREDICTED = "prediction_cpu.json"
JOINED = "joined_rollout.json"
CONFIGURATIONS = {"count": count(PREDICTED, "configurations", Each(), "name", reduce="count")}
REAL = Each({"family": "real engines"})
ACCURATE = [
    Row("a step predicted before the run, {count} configurations: median error", percent(PREDICTED, "median_error"),
        "benchmarks/prediction/prediction.py", "worst", percent(PREDICTED, "worst_error"), CONFIGURATIONS),
    Row("a step predicted before the run, {count} plans with real engines, a tiny model on two cores: median error",
        percent(PREDICTED, "configurations", REAL, "error", reduce="median"), "benchmarks/prediction/prediction.py",
        "worst", percent(PREDICTED, "configurations", REAL, "error", reduce="max"),
        {"count": count(PREDICTED, "configurations", REAL, "error", reduce="count")}),
    Row("pairs of a synchronous and an asynchronous plan of which the prediction names the faster one", count(PREDICTED, "signs_right"),
        "benchmarks/prediction/prediction.py", "pairs", count(PREDICTED, "signs")),
    Row("of these, pairs where the synchronous plan is faster", count(PREDICTED, "signs_right_where_async_loses"),
        "benchmarks/prediction/prediction.py", "pairs", count(PREDICTED, "signs_where_async_loses")),
    Row("measured step of the plan predicted as best, relative to the best measured step: worst case",
        times(PREDICTED, "predicted best over measured best", form="{:.3f}", reduce="max"), "benchmarks/prediction/prediction.py"),
    Row("seconds of a batch of vLLM on an H200 that others join, predicted from runs batch by batch, {count} settings: median error",
        percent(JOINED, "rollout_h200.json", "median_error"), "benchmarks/prediction/joined_rollout.py",
        "worst", percent(JOINED, "rollout_h200.json", "worst_error"),
        {"count": count(JOINED, "rollout_h200.json", "ways", Each(), "way", reduce="count")}),
    Row("the same for a tiny model on two cores, with all time given to decode steps",
        percent(JOINED, "rollout_cpu.json, steps alone", "median_error"),
        "benchmarks/prediction/joined_rollout.py", "worst", percent(JOINED, "rollout_cpu.json, steps alone", "worst_error")),
    Row("published synchronous step, over the step predicted from its published stages: the ratio farthest from 1",
        share("seed_tables.json", "rows", Each({"kind": "sync"}), "ratio", form="{:.3f}", reduce="farthest from 1"),
        "benchmarks/prediction/seed_tables.py", "rows", count("seed_tables.json", "rows", Each({"kind": "sync"}), "ratio", reduce="count")),
    Row("the same for asynchronous steps", share("seed_tables.json", "rows", Each({"kind": "async"}), "ratio", form="{:.3f}",
        reduce="farthest from 1"), "benchmarks/prediction/seed_tables.py",
        "rows", count("seed_tables.json", "rows", Each({"kind": "async"}), "ratio", reduce="count")),
    Row("period of the plan that `rg.tune` chooses, over the best of all plans, 2 to 16 GPUs: at most",
        share("tune.json", "worst_apart", form="1 + {:.0e}"), "benchmarks/prediction/tune.py"),
    Row("a step on H200s estimated without any measurement of it, {runs} runs held out: median factor above or below the measured one",
        share("a_priori_h200.json", "median_factor_held_out"), "benchmarks/prediction/a_priori.py",
        "worst", share("a_priori_h200.json", "worst_factor_held_out"), {"runs": count("a_priori_h200.json", "held_out")}),
    Row("`rg.tune` of {plans} plans", seconds("tune.json", "tune_s", "median"), "benchmarks/prediction/tune.py",
        words={"plans": count("tune.json", "tune_s", "candidates")}),
    Row("`rg.compile` of 20 nodes", ms("tune.json", "compile_20_nodes_s", "median"), "benchmarks/prediction/tune.py"),
]  # fmt: skip

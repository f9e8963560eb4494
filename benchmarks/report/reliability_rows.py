"""The rows of what goes wrong: kills, faults, malformed inputs, checkpoints and long runs."""

from benchmarks.lib.figures import Each, Figure, count, ms, percent, seconds, share
from benchmarks.report.table import Row

CHECKPOINTS, SOAK, KILLS, FAULTS = "checkpoint_cost_cpu.json", "soak_cpu.json", "kills_cpu.json", "injected_faults_cpu.json"


def rate(way: str) -> Figure:
    return Figure("gathering_cpu.json", ("ways", way, "median_bytes_s"), "{:,.0f} MB/s", 1e-6)


def growth(process: str) -> Row:
    held = "second and last quarter", process, "rss_kib"
    return Row(f"memory of {process} in the last quarter of {{steps}} steps at depth 2, {{all}}",
               Figure(SOAK, (*held, 1), "{:,.0f} KiB"), "benchmarks/reliability/soak.py", "second quarter",
               Figure(SOAK, (*held, 0), "{:,.0f} KiB"),
               {"steps": count(SOAK, "steps"), "all": seconds(SOAK, "seconds", form="{:.0f} s")})  # fmt: skip


def kills(mode: str, told: str) -> Row:
    where = "parts", Each({"mode": mode})
    return Row(f"SIGKILLs at random times, {told}, after which the run continues with the batches and weights of the undisturbed run",
               count(KILLS, *where, "kills in all", reduce="sum"), f"benchmarks/reliability/kills.py {mode}",
               "findings", count(KILLS, *where, "wrong", reduce="items"))  # fmt: skip


def faults(on: str, told: str) -> Row:
    return Row(f"faults injected into every stage, {told}: faults named by the first line of the error (a slow node: by a warning)",
               count(FAULTS, on, "first line names the culprit"), f"benchmarks/reliability/injected_faults.py {on}", "faults",
               count(FAULTS, on, "faults"))  # fmt: skip


def chaos(file: str, told: str) -> Row:
    words = {"minutes": count(file, "minutes")} | ({"plans": count(file, "hosts_of_plans", reduce="count")} if told else {})
    return Row(f"kills of workers and hosts, cuts and freezes on three hosts in {{minutes}} minutes{told}, "
               "after which every step equals the same step of an undisturbed run",
               count(file, "events_in_all"), "benchmarks/reliability/chaos.py",
               "steps that differ", count(file, "wrong", reduce="count"), words)  # fmt: skip


RELIABLE = [
    Row("states reached by every order of firing of all training graphs of up to 5 nodes, none with a broken bound or a deadlock",
        count("model_check.json", "states_in_all"), "benchmarks/reliability/model_check.py"),
    kills("here", "one process"),
    kills("ray", "worker, driver and Ray's own processes on Ray"),
    faults("forked", "forked workers"),
    faults("ray", "workers on Ray"),
    chaos("chaos_cpu.json", ""),
    chaos("chaos_hosts_cpu.json", " and for up to a minute each, during which the run continued on the other hosts, under {plans} plans"),
    Row("malformed inputs to channels and driver", count("fuzz_cpu.json", Each(), "cases", reduce="sum"), "benchmarks/reliability/fuzz.py",
        "inputs whose code ran", count("fuzz_cpu.json", "code that ran", reduce="count")),
    Row("a checkpoint of {size} every 10 steps, SmolLM2: share of the time that training stands still",
        percent(CHECKPOINTS, "training stalled, share of ten steps (median)"), "benchmarks/speed/checkpoint_cost.py",
        words={"size": Figure(CHECKPOINTS, ("bytes of a checkpoint",), "{:.1f} GB", 1e-9)}),
    Row("ten steps while such a checkpoint is written, no core free, relative to ten without: first time",
        share(CHECKPOINTS, "ten steps with a checkpoint over ten without", 0), "benchmarks/speed/checkpoint_cost.py",
        "second time", share(CHECKPOINTS, "ten steps with a checkpoint over ten without", 1)),
    *(
        Row(f"256 MiB of a checkpoint, sent to the driver's host and written there{how}", rate(way), "benchmarks/prediction/gathering.py",
            "plain socket and fsync", rate("plain socket and fsync"))
        for way, how in (("rlgraph", ""), ("rlgraph, encrypted", ", `encrypt=True`"))
    ),
    *map(growth, ("generator", "policy", "driver")),
    Row("step time of that run, last quarter", ms(SOAK, "step_s", "last quarter", form="{:.2f} ms"), "benchmarks/reliability/soak.py",
        "second quarter", ms(SOAK, "step_s", "second quarter", form="{:.2f} ms")),
]  # fmt: skip

"""verl 0.9.1 on the job of `peer_job.py`, on two GPUs: seconds of each step, with every setting that was chosen for it.

    python benchmarks/peers/run_verl.py one_step_off|colocated --site SITE [--response-tokens 1024] [--steps 4] [--json PATH]
    python benchmarks/peers/run_verl.py one_step_off --site SITE --smoke     # composes verl's configuration, on any machine

`one_step_off` is verl's experimental recipe, a GPU for each side; `colocated` its synchronous trainer on both. SITE holds
requirements.txt, patched; torch, transformers, vLLM and Ray are those of the environment. README.md beside this says why each
setting differs from verl's default. `verl_s` in the results is verl's own `timing_s/step`; `wall_s` is between two of its lines.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


HERE = Path(__file__).resolve().parent

WARM_UP = 2  # steps that are not counted: the first ones of an asynchronous run overlap nothing
KEPT = ("timing_s/step", "timing_s/gen", "timing_s/generate_async", "timing_s/update_actor", "timing_s/update_weights",
        "timing_s/sync_rollout_weights", "timing_s/wait_prev_gen", "perf/total_num_tokens", "perf/mfu/actor")  # fmt: skip
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VERL_LOGGING_LEVEL": "ERROR",  # verl warns once for each sample otherwise
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
}
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024)  # sequences of a decode step that is a CUDA graph
MODULES = {"one_step_off": "verl.experimental.one_step_off_policy.main_ppo", "colocated": "verl.trainer.main_ppo"}


def overrides(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Make verl's configuration for the job, as hydra's overrides."""
    common = {
        "hydra.searchpath": "[pkg://verl.trainer.config]",
        "hydra.run.dir": work / "hydra",
        "data.train_files": work / "inputs/data/train.parquet",
        "data.val_files": work / "inputs/data/val.parquet",
        "data.train_batch_size": given.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": given.response_tokens,
        "data.truncation": "error",
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": work / "inputs/model",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": given.prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": given.micro_batch_tokens,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": True,
        "reward.custom_reward_function.path": HERE / "reward.py",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.nnodes": 1,
        "trainer.total_training_steps": given.steps,
        "trainer.total_epochs": 1000,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console]",
        "trainer.default_local_dir": work / "checkpoints",
        "+ray_kwargs.ray_init.include_dashboard": False,
        "ray_kwargs.ray_init.num_cpus": 64,  # verl's actors ask for more cores than they use
        "+ray_kwargs.ray_init.object_store_memory": 4_000_000_000,
    }
    if given.mode == "one_step_off":
        placed = {"actor_rollout_ref.hybrid_engine": False, "trainer.n_gpus_per_node": 1, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 1}
    else:
        placed = {"trainer.n_gpus_per_node": 2, "trainer.use_v1": False}  # the newer trainer looks for work every 2 s only
    return common | of_rollouts(given) | placed


def of_rollouts(given: argparse.Namespace) -> dict[str, Any]:
    """Make the part of the configuration that its rollouts have."""
    rollout, sequences = "actor_rollout_ref.rollout", given.prompts * given.group_size
    return {
        f"{rollout}.name": "vllm",
        f"{rollout}.mode": "async",
        f"{rollout}.n": given.group_size,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.gpu_memory_utilization": given.engine_memory,
        f"{rollout}.enforce_eager": False,
        f"{rollout}.max_model_len": 64 + given.response_tokens,
        f"{rollout}.max_num_seqs": sequences,
        f"{rollout}.max_num_batched_tokens": 16384,
        f"{rollout}.load_format": "auto",
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.cudagraph_capture_sizes": str([size for size in CAPTURED if size <= sequences]).replace(" ", ""),
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": given.bucket_mib,
        f"+{rollout}.engine_kwargs.vllm.attention_backend": "FLASH_ATTN",
    }


def steps_of(lines: list[tuple[float, str]]) -> list[dict[str, float]]:
    """Read the metrics of each step that verl printed, with the seconds at which the line came."""
    steps = []
    for second, line in lines:
        if (found := re.search(r"step:\d+ - (.*)", line)) and "timing_s/step:" in line:
            pairs = (item.rpartition(":") for item in found[1].split(" - "))
            values = {name.strip(): re.sub(r"^np\.\w+\((.*)\)$", r"\1", value.strip()) for name, _, value in pairs}
            steps.append({name: float(value) for name, value in values.items() if name in KEPT} | {"at_s": second})
    return steps


def watch(command: list[str], environment: dict[str, str], limit_s: float, log: Path) -> list[tuple[float, str]]:
    """Run a command for at most so long; write its log, and return each line with the second at which it came."""
    start, lines = time.monotonic(), []
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    alarm = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGTERM))
    alarm.start()
    try:
        with log.open("w", encoding="utf-8") as out:
            for line in process.stdout or ():
                lines.append((time.monotonic() - start, line))
                out.write(f"[{lines[-1][0]:8.2f}] {line}")
                if "timing_s/step:" in line:
                    found = steps_of(lines[-1:])[0]
                    print(f"verl at {found['at_s']:.0f} s: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
    finally:
        alarm.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return lines


def summary(given: argparse.Namespace, steps: list[dict[str, float]], settings: dict[str, Any], work: Path) -> dict[str, Any]:
    """Make the row of the results: medians over the steps after the warm-up, and what was set."""
    timed = steps[WARM_UP:]
    walls = [after["at_s"] - before["at_s"] for before, after in zip(steps[WARM_UP - 1 :], timed, strict=False)]
    shown = {key: str(value).replace(str(work), "WORK").replace(str(HERE), "benchmarks/peers") for key, value in settings.items()}
    return {
        "mode": given.mode,
        "model": given.shape or "SmolLM2-135M",
        "steps_timed": len(timed),
        "verl_s": statistics.median(step["timing_s/step"] for step in timed),
        "wall_s": statistics.median(walls),
        "spread_s": [min(walls), max(walls)],
        "start_s": steps[0]["at_s"] - steps[0]["timing_s/step"],
        "timings": {
            name: statistics.median(step[name] for step in timed if name in step) for name in KEPT if any(name in s for s in timed)
        },
        "overrides": shown,
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=tuple(MODULES))
    parser.add_argument("--site", type=Path, required=True, help="folder with verl and what requirements.txt names")
    parser.add_argument("--shape", help="random weights of this Qwen3 shape instead of SmolLM2-135M")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--engine-memory", type=float, default=0.5)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--work", type=Path, help="folder for model, data and log; a temporary one without it")
    parser.add_argument("--smoke", action="store_true", help="compose the configuration and stop")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    given = parsed()
    work = (given.work or Path(tempfile.mkdtemp(prefix="verl-peer-"))).resolve()
    target = given.json.resolve() if given.json else None
    settings = overrides(given, work)
    own = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")])),
    }
    environment = {**os.environ, **ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(given.site.resolve()), os.environ.get("PYTHONPATH")]))
    if not (
        work / "inputs"
    ).exists():  # the model is written with rlgraph's packages, the data with verl's: they do not go into one process
        shape = ["--shape", given.shape] if given.shape else []
        for what, paths in (("data", environment), ("model", own)):
            subprocess.run([sys.executable, str(HERE / "inputs.py"), what, str(work / "inputs" / what), *shape], check=True, env=paths)
    command = [sys.executable, "-m", MODULES[given.mode], *(f"{key}={value}" for key, value in settings.items())]
    os.chdir(work)
    if given.smoke:
        subprocess.run([*command, "--cfg", "job", "--resolve"], check=True, env=environment, stdout=subprocess.DEVNULL)
        print("verl takes the configuration")
        return
    steps = steps_of(watch(command, environment, given.limit_s, work / "verl.log"))
    if len(steps) <= WARM_UP:
        print((work / "verl.log").read_text(encoding="utf-8")[-6000:])
        raise SystemExit(f"verl finished {len(steps)} steps, of which {WARM_UP} warm up; give it more --limit-s")
    row = summary(given, steps, settings, work)
    print(f"verl {given.mode}: {row['wall_s']:.2f} s a step (median of {row['steps_timed']})")
    if target:
        from benchmarks.lib.machine import machine

        target.write_text(json.dumps(row | machine(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

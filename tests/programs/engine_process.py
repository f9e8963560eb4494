"""A process with an engine that generates in it, started by a test: `python engine_process.py ENGINE FOLDER OUT`."""

import resource
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.engine_conversations import compare_conversations, inspect_caches
from support.engine_steps import step_engine
from support.generation_requests import DRAWN, FREE, SEEDS, sample_requests, sleep_and_sample
from support.tiny import VLLM_PROMPTS, other_weights

from rlgraph.engines.api import GenerateEngine, Request
from rlgraph.values.sampling import Sampling

THREADS = 1
GIVEN = {"max_num_batched_tokens": 2000}  # to vLLM, by its user


def vllm(folder: Path) -> GenerateEngine:
    from rlgraph.engines.vllm.engine import VllmEngine

    return VllmEngine(folder, max_model_len=64, dtype="float32", kv_cache_bytes=64 << 20, threads=THREADS, engine_args=GIVEN)


def sglang(folder: Path, overlap: bool | None = None) -> GenerateEngine:
    from rlgraph.engines.sglang.engine import SglangEngine

    return SglangEngine(folder, max_context=64, dtype="float32", kv_cache_bytes=64 << 20, threads=THREADS, overlap=overlap)


def find_differences(engine: Any) -> dict[str, list[str]]:
    """Find where requests that were copied differ from what vLLM makes of each, by the way to sample."""
    from msgspec.structs import asdict as fields

    from rlgraph.engines.vllm.engine import CoreRequests

    found: dict[str, list[str]] = {}
    for name, sampling in {**DRAWN, "stops": Sampling(stop_token_ids=(5, 9)), "stops nowhere": FREE}.items():
        maker = CoreRequests(engine.llm, (3, 4))
        for row, prompt in enumerate(VLLM_PROMPTS):
            request = Request(f"r{row}", prompt, replace(sampling, max_tokens=5 + row), 7 + row)
            made = fields(maker.make(request, f"salt {row}"))
            params, tasks = maker._params(request.sampling), engine.llm.get_supported_tasks()
            params.seed, given = request.seed, {"prompt_token_ids": list(prompt), "cache_salt": f"salt {row}"}
            whole = fields(engine.llm.input_processor.process_inputs(f"r{row}", given, params, supported_tasks=tasks))
            made["sampling_params"], whole["sampling_params"] = fields(made["sampling_params"]), fields(whole["sampling_params"])
            assert made.pop("request_id").startswith(whole.pop("request_id"))
            assert made.pop("external_req_id") == f"r{row}"
            found.setdefault(name, []).extend(key for key, value in made.items() if value != whole[key] and key != "arrival_time")
    return found


def compare_copies(engine: Any, folder: Path) -> dict[str, bool]:
    """Compare the parameters after recorded copies with those after the model's own loader, to the bit."""
    model, weights = engine._scheduler.tp_worker.model_runner.model, load_file(folder / "model.safetensors")
    engine.load_weights(weights)  # the copies are recorded by now
    replayed = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.load_weights((name, torch.full_like(weight, 7.0)) for name, weight in weights.items())
    model.load_weights(weights.items())
    return {name: torch.equal(parameter, replayed[name]) for name, parameter in model.named_parameters()}


def run_sglang_sleep(engine: Any) -> tuple[set[str], set[str]]:
    """Let SGLang's own code run, though a CPU has nothing to free, with a request dropped under way; return what it takes for freed."""
    engine._shared = True
    freed = engine._scheduler.weight_updater.offload_tags
    engine.submit(Request("dropped", [5, 6, 7], FREE, 1))
    engine.step()
    engine.abort(["dropped"])
    engine.sleep()
    asleep = set(freed)
    engine.wake()
    return asleep, set(freed)


def record_opened_paths(*folders: str) -> set[str]:
    """Collect the paths below these folders that this process opens or makes from now on."""
    opened: set[str] = set()

    def note(event: str, given: tuple[Any, ...]) -> None:
        if event in ("open", "tempfile.mkdtemp", "tempfile.mkstemp") and isinstance(given[0], str) and given[0].startswith(folders):
            opened.add(given[0])

    sys.addaudithook(note)
    return opened


def main(engine: str, folder: Path, out: Path) -> None:
    opened = record_opened_paths("/dev/shm/", f"{tempfile.gettempdir()}/tmp")
    made = {"vllm": vllm, "sglang": sglang, "sglang overlap": lambda folder: sglang(folder, overlap=True)}[engine](folder)
    weights = load_file(folder / "model.safetensors")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "children_s": children.ru_utime + children.ru_stime}
    found |= sample_requests(made, weights)
    if engine != "vllm":
        found["asleep"], found["awake"] = run_sglang_sleep(made)
    found["slept"] = [asdict(response) for response in sleep_and_sample(made)]
    before, started = time.process_time(), time.perf_counter()
    for _ in range(20):
        made.generate(VLLM_PROMPTS, FREE, SEEDS)
    found["cores"] = (time.process_time() - before) / (time.perf_counter() - started)
    found["stepped"] = step_engine(made, weights)
    found["talked"] = compare_conversations(made, weights)
    if engine == "vllm":
        found["held"] = inspect_caches(made)
        found["differing"] = find_differences(made)
        found["compiled"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found["batched_tokens"] = made.llm.vllm_config.scheduler_config.max_num_batched_tokens  # type: ignore[attr-defined]
    else:
        made.load_weights(other_weights(weights, 1))
        found["copied"] = compare_copies(made, folder)
    made.close()
    found["left"] = sorted(path for path in opened if Path(path).exists())
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

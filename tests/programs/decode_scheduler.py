"""Drive vLLM's scheduler and rlgraph's by the same random events, without a model; print where their steps differ, and how many were short.

    python decode_scheduler.py FOLDER SEEDS

A token is a function of its request and its place. A step's result comes one step late where steps are scheduled ahead, as on a GPU.
"""

import json
import os
import random
import sys
import zlib
from collections import deque
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rlgraph.engines.vllm.scheduler import AheadScheduler, DecodeScheduler

BLOCK, LONGEST, REQUESTS, STEPS = 16, 256, 48, 240


def token(name: str, place: int) -> int:
    return zlib.crc32(f"{name} {place}".encode()) % 97


class Run:
    """A scheduler with a runner that only keeps what it is told. `trace` holds each step as the runner saw it, `found` the responses."""

    def __init__(self, kind: type, config: Any, blocks: int, sliding: bool) -> None:
        spec = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**spec))]
        groups += [KVCacheGroupSpec(["window"], SlidingWindowSpec(**spec, sliding_window=24))] if sliding else []
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = issubclass(kind, AsyncScheduler)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.sliding = sliding
        self.ahead = issubclass(kind, AsyncScheduler)
        self.queue: deque[tuple[Any, dict[str, int]]] = deque()
        self.trace: list[Any] = []
        self.found: dict[str, list[Any]] = {}
        self.hasher = get_request_block_hasher(BLOCK, lambda value: zlib.crc32(repr(value).encode()).to_bytes(8, "big"))
        self.held: dict[str, int] = {}  # the tokens of a request that the runner has, with those that it is sampling

    def add(self, name: str, prompt: list[int], params: Any, *, resumable: bool = False) -> None:
        self.found.setdefault(name, [[], [], None])[2] = None
        self.scheduler.add_request(Request(name, list(prompt), params, None, block_hasher=self.hasher, resumable=resumable))

    def go_on(self, turns: dict[str, list[Any]], *, end: bool = False) -> None:
        """Give each conversation whose turn has ended its next one; `end` those that have none, or all."""
        for name in [name for name in turns if self.found[name][2] is not None and name in self.scheduler.requests]:
            if turns[name] and not end:
                self.add(name, *turns[name].pop(0), resumable=True)
            else:
                self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        output = self.scheduler.schedule()
        cached = output.scheduled_cached_reqs
        self.trace.append(
            (
                sorted(output.num_scheduled_tokens.items()),
                list(output.num_scheduled_tokens),
                [(new.req_id, self.blocks(new.block_ids), new.num_computed_tokens) for new in output.scheduled_new_reqs],
                list(
                    zip(
                        cached.req_ids,
                        map(self.blocks, cached.new_block_ids),
                        cached.num_computed_tokens,
                        cached.num_output_tokens,
                        strict=True,
                    )
                ),
                sorted(cached.resumed_req_ids | cached.all_token_ids.keys()),
                sorted(output.finished_req_ids),
                sorted(output.preempted_req_ids or ()),
            )
        )
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        ends = {name: starts[name] + count for name, count in output.num_scheduled_tokens.items()}
        for name in [*(new.req_id for new in output.scheduled_new_reqs), *cached.resumed_req_ids]:  # read from the beginning
            self.held[name] = self.scheduler.requests[name].num_tokens
        samples = {name: end >= self.held[name] for name, end in ends.items()}  # a part of a prompt samples nothing
        for name, sampled in samples.items():
            self.held[name] += sampled
        self.queue.append((output, {name: end if samples[name] else -1 for name, end in ends.items()}))
        while self.queue and (len(self.queue) > self.ahead or not output.total_num_scheduled_tokens):
            self.finish(*self.queue.popleft())

    def finish(self, output: Any, ends: dict[str, int]) -> None:
        order = sorted(ends)  # a runner has an order of its own
        sampled = [[token(name, ends[name])] if ends[name] >= 0 else [] for name in order]
        rows = np.array([[token(name, ends[name]) / 7] for name in order], dtype=np.float32).reshape(len(order), 1)
        result = ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={name: place for place, name in enumerate(order)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(rows.astype(np.int32), rows, rows[:, 0]),
        )
        outputs = self.scheduler.update_from_output(output, result)
        self.take_tokens()
        for each in outputs[0].outputs if outputs and 0 in outputs else ():
            found = self.found[each.request_id]
            found[0] += each.new_token_ids
            found[1] += each.new_logprobs.logprobs[:, 0].tolist() if each.new_logprobs is not None and each.new_token_ids else []
            found[2] = found[2] or (None if each.finish_reason is None else str(each.finish_reason))

    def blocks(self, numbers: Any) -> Any:
        """The blocks that a request gets, or how many, if there are windows: the short way frees blocks behind them later."""
        return numbers if not self.sliding or numbers is None else [len(group) for group in numbers]

    def take_tokens(self) -> None:
        for each in getattr(self.scheduler, "take_tokens", list)():
            found = self.found[each.name]
            found[0] += each.tokens
            found[1] += each.log_probs
            found[2] = found[2] or each.finish

    def event(self, kind: str, draw: random.Random) -> None:
        if kind == "drop":
            names = sorted(self.scheduler.requests)
            if names:
                self.scheduler.finish_requests([draw.choice(names)], RequestStatus.FINISHED_ABORTED)
        elif kind in ("pause", "reset"):
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while self.queue:
                self.finish(*self.queue.popleft())
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
            if kind == "reset":
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.take_tokens()


def sampling(draw: random.Random) -> Any:
    length, ends = draw.choice([1, 2, 40, 150, 400]), [draw.randrange(97) for _ in range(draw.choice([0, 1, 2]))]
    return SamplingParams(max_tokens=length, stop_token_ids=ends, logprobs=0, detokenize=False, ignore_eos=True)


def drive(run: Run, seed: int) -> Run:
    draw = random.Random(seed)
    arrivals = sorted(draw.randrange(STEPS // 2) for _ in range(REQUESTS))
    events = {draw.randrange(STEPS): draw.choice(["drop", "pause", "reset"]) for _ in range(6)}
    prompts = [[draw.randrange(100) for _ in range(draw.randrange(1, 60))] for _ in range(REQUESTS)]
    prompts[5] = list(prompts[4])  # of one group
    added, turns = 0, dict[str, list[Any]]()
    for step in range(STEPS):
        while added < REQUESTS and arrivals[added] <= step:
            name, talks = f"r{added}", added % 3 == 0 and not run.ahead  # as the engine's conversations on a CPU
            first, *more = [(prompts[added], sampling(draw))] + [([1, 2, 3], sampling(draw)) for _ in range(2 * talks)]
            run.add(name, *first, resumable=talks)
            if talks:
                turns[name] = more
            added += 1
        if step in events:
            run.go_on(turns, end=events[step] == "reset")  # of the keys and values that they keep
            run.event(events[step], draw)
        run.go_on(turns)
        if run.scheduler.has_requests() or run.queue:
            run.step()
    while (run.scheduler.has_requests() or run.queue) and len(run.trace) < 5000:
        run.go_on(turns)
        run.step()
    if hasattr(run.scheduler, "settle"):
        run.scheduler.settle()
    run.take_tokens()
    return run


def main() -> None:
    config = EngineArgs(
        model=sys.argv[1],
        max_model_len=LONGEST,
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_num_batched_tokens=128,
        disable_log_stats=True,
        block_size=BLOCK,
        dtype="float32",
    ).create_engine_config()
    init_none_hash(lambda value: zlib.crc32(repr(value).encode()).to_bytes(8, "big"))
    found = []
    for own, ours in ((Scheduler, DecodeScheduler), (AsyncScheduler, AheadScheduler)):
        for seed in range(int(sys.argv[2])):
            blocks, sliding = (400, 60)[seed % 2], seed % 3 == 2
            expected, ran = (drive(Run(kind, config, blocks, sliding), seed) for kind in (own, ours))
            first = next((step for step, pair in enumerate(zip(expected.trace, ran.trace, strict=False)) if pair[0] != pair[1]), None)
            found.append(
                {
                    "scheduler": ours.__name__,
                    "seed": seed,
                    "steps": len(ran.trace),
                    "as many": len(expected.trace) == len(ran.trace),
                    "short": ran.scheduler.short,
                    "first difference": first,
                    "tokens": sum(len(each[0]) for each in expected.found.values()),
                    "same": expected.found == ran.found,
                    "preempted": sum(len(step[-1]) for step in ran.trace),
                }
            )
            if first is not None:
                print(expected.trace[first], ran.trace[first], sep="\n", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

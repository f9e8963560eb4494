"""A profile of two steps on a GPU: its kernels, and the history of its memory."""

import gzip
import json
import pickle
from pathlib import Path

import torch

from rlgraph.analysis.samples import MEMORY, TRACE
from rlgraph.runtime.messages import ProfileRequest
from rlgraph.runtime.worker.progress import StepProfiler

profiler = StepProfiler("policy", gpus=True)
profiler.request = ProfileRequest(1, 2, ["policy"], ".")
for step in range(4):
    profiler.begin_step(step)
    torch.ones(1 << 20, device="cuda").mul_(2).sum().item()
    profiler.after(step)
events = json.loads(gzip.decompress(Path(f"policy-steps-1-2{TRACE}").read_bytes()))["traceEvents"]
assert sum(event.get("name") == "aten::mul_" for event in events) == 2
assert any(event.get("cat") == "kernel" for event in events)
snapshot = pickle.loads(Path(f"policy-steps-1-2{MEMORY}").read_bytes())
allocated = [event for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"]
assert sum(event["size"] >= 4 << 20 for event in allocated) == 2
print("two steps are profiled")

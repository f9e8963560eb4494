"""Which experts an engine of vLLM chose for each token of its requests.

vLLM 0.26 has a capture of its own only in its first model runner, and later ones only in the second, which CPUs do not run. So the
routers write their choice into a buffer here, whose copies a recorded CUDA graph repeats, and each step's rows are dealt to its requests.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from rlgraph.errors import GraphError

BLOCK = 16  # tokens: prefixes are shared in whole blocks of vLLM's, which are multiples of it


def write_down(model: Any, config: Any) -> torch.Tensor:
    """Have the routers of a model write the experts that they choose in a step into a buffer `[tokens, layers, k]`, and return it.

    Raises GraphError for a model without routers, or whose experts choose inside of their kernel.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    layers = [module for module in model.modules() if isinstance(module, MoERunner)]
    if not layers:
        raise GraphError("Generator(routes=True): the model has no routers of experts; leave out routes")
    silent = [layer for layer in layers if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter)]
    if silent:
        raise GraphError(
            f"Generator(routes=True): the experts of {type(model).__name__} are chosen inside one kernel, which does not report them; use "
            "another engine, or leave out routes"
        )
    device = next(model.parameters()).device
    most = max(config.scheduler_config.max_num_batched_tokens, *(config.compilation_config.cudagraph_capture_sizes or [0]))
    chosen = torch.full((most, len(layers), layers[0].router.top_k), -1, dtype=torch.int16, device=device)

    def make_writer(layer: int) -> Any:
        def write(experts: torch.Tensor) -> None:
            chosen[: len(experts), layer].copy_(experts)

        return write

    for layer, module in enumerate(layers):
        module.router.set_capture_fn(make_writer(layer))
    return chosen


class RouteRecorder:
    """Deals the choices of each step to the requests that were read in it, by the engine's names of them.

    A token keeps the experts with which it was read first: under the weights that sampled what follows it. The tokens of a prefix that
    vLLM has in its cache are not read again; their routes are those of the request that began with them first, under the same weights.
    """

    def __init__(self, worker: Any, *, on_cpu: bool) -> None:
        self._chosen = write_down(worker.get_model(), worker.vllm_config) if on_cpu else worker.chosen
        self._read: dict[str, list[tuple[int, torch.Tensor]]] = {}  # by request: the place of the first token, and rows `[n, layers, k]`
        self._under_way: list[tuple[Any, list[tuple[str, int, int, int]], torch.Tensor]] = []
        self._prefixes: dict[int, str | torch.Tensor] = {}  # by block and all before it: the request that reads it, later its routes
        self._of: dict[str, tuple[list[int], dict[int, str | torch.Tensor]]] = {}  # blocks of a prompt, and the prefixes of its weights
        self._order: list[str] = []
        self._wrap(worker.model_runner)

    def _wrap(self, runner: Any) -> None:
        execute: Any = runner.execute_model
        prepare: Any = getattr(runner, "prepare_inputs", None)  # of the second model runner, which orders a step's requests here

        def prepare_inputs(*given: Any, **more: Any) -> Any:
            batch = prepare(*given, **more)
            self._order = list(batch.req_ids)
            return batch

        def execute_model(scheduled: Any, *given: Any, **more: Any) -> Any:
            output = execute(scheduled, *given, **more)
            if scheduled.total_num_scheduled_tokens:
                self._record(scheduled, self._order if prepare is not None else list(runner.input_batch.req_ids))
            return output

        if prepare is not None:
            runner.prepare_inputs = prepare_inputs
        runner.execute_model = execute_model

    def _record(self, scheduled: Any, order: Sequence[str]) -> None:
        """Begin to copy the rows of a step; they are there once the step's tokens are."""
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        counts = [scheduled.num_scheduled_tokens[name] for name in order]
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        rows = [(name, starts[name], first, last) for name, (first, last) in zip(order, pairwise(ends), strict=True)]
        if self._chosen.device.type == "cpu":
            self._under_way.append((None, rows, self._chosen[: ends[-1]].clone()))
            return
        copy = torch.empty((ends[-1], *self._chosen.shape[1:]), dtype=self._chosen.dtype, pin_memory=True)
        copy.copy_(self._chosen[: ends[-1]], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((event, rows, copy))

    def _collect(self) -> None:
        """Deal the rows of the steps that are done."""
        while self._under_way and (self._under_way[0][0] is None or self._under_way[0][0].query()):
            _, rows, chosen = self._under_way.pop(0)
            if bool((chosen < 0).any()):
                raise GraphError("Generator(routes=True): a layer of the engine did not report its chosen experts; leave out routes")
            for name, start, first, last in rows:
                if name in self._read:
                    self._read[name].append((start, chosen[first:last]))

    def begin(self, name: str, prompt: Sequence[int]) -> None:
        """Expect a request."""
        blocks, before = list[int](), 0
        for first in range(0, len(prompt) - BLOCK + 1, BLOCK):
            before = hash((before, *prompt[first : first + BLOCK]))
            blocks.append(before)
            self._prefixes.setdefault(before, name)
        self._read[name], self._of[name] = [], (blocks, self._prefixes)

    def forget(self, waiting: Sequence[str]) -> None:
        """Share nothing with requests of earlier weights; what `waiting` requests have read is read again."""
        self._collect()
        self._prefixes = {}
        for name in waiting:
            self._read[name].clear()
            blocks = self._of[name][0]
            self._of[name] = (blocks, self._prefixes)
            for block in blocks:
                self._prefixes.setdefault(block, name)

    def take(self, name: str, tokens: Sequence[int]) -> torch.Tensor:
        """Assemble the routes `[len(tokens), layers, k]` of a request that has ended with these tokens; -1 where they are not known."""
        self._collect()
        found = self._so_far(name, len(tokens))
        blocks, prefixes = self._of[name]
        for index, block in enumerate(blocks):
            own = found[index * BLOCK : (index + 1) * BLOCK]
            owner = prefixes.get(block)
            unread = bool((own < 0).any())
            if isinstance(owner, str) and owner == name:
                prefixes[block] = own.clone()
            elif unread and owner is not None:
                told = self._so_far(owner, (index + 1) * BLOCK + 1)[index * BLOCK : -1] if isinstance(owner, str) else owner
                own.copy_(torch.where(own < 0, told, own))
        found[-1] = -1
        del self._read[name], self._of[name]
        return found

    def _so_far(self, name: str, count: int) -> torch.Tensor:
        found = torch.full((count, *self._chosen.shape[1:]), -1, dtype=torch.int16)
        for start, rows in reversed(self._read.get(name, [])):
            found[start : start + len(rows)] = rows[: max(count - start, 0)]
        return found

"""A model as it is to run, and the memory that it needs on a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlgraph.costs.model_shapes import ModelShape
from rlgraph.settings import Recompute


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model of a graph as it is to run: `workers` engines or ranks, each on `width` devices.

    `itemsize` is the bytes of a number that passes compute with, `rows` the responses of a step over all workers. Prompt and response
    together have `longest` tokens at most and `usual` on average. `copies` of the weights lie on the devices of an engine that generates.
    `micro_batch_tokens` bounds the tokens of a pass; with `recompute` a layer keeps a part, and with `fused_head` no pass has the
    logits of all its tokens (None: it has none). With `one_moment` the optimizer keeps one moment of each matrix of a layer, `moments`
    says how many bits a number of them has, with `host_moments` they are on the host. `tensor` workers share the matrices of a layer, and
    with `context` others a pass. Only the `adapter` numbers of a model that trains an adapter have gradients and moments; the model itself
    has `frozen_bytes`, and if its matrices are `remade`, one of them is there in the dtype of passes at a time. An engine that merges
    adapters keeps the `merged` numbers of the matrices that they change, and its further copies have `version_bytes` (None: whole weights).
    An engine `in_fp8` has its layers in fp8; versions on their way are not. Its keys and values have `kv_itemsize` bytes a number (None:
    as passes). With `packed` each rank has all matrices a second time, as its kernels want them. Layers that are `compiled` keep less, and
    `plain_scores` of logits are computed without a kernel of their own, in copies in float32.
    """

    shape: ModelShape
    itemsize: int
    workers: int
    width: float
    rows: int
    longest: float
    usual: float
    copies: int = 1
    trained: bool = False
    micro_batch_tokens: int = 0
    recompute: Recompute = False
    fused_head: bool | None = None
    one_moment: bool = False
    moments: str = "32bit"
    host_moments: bool = False
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    adapter: int | None = None
    frozen_bytes: int = 0
    remade: bool = False
    merged: int = 0
    version_bytes: int | None = None
    packed: bool = False
    in_fp8: bool = False
    kv_itemsize: int | None = None
    compiled: bool = False
    plain_scores: bool = False

    @property
    def sharing(self) -> int:
        """The workers that compute one pass together."""
        return self.tensor * self.context * self.pipeline


@dataclass(frozen=True)
class Need:
    """Bytes of one model on one device: what stays, and what is there only while its own nodes run, at the instant when that is most. It
    needs at least `least`. `instants` has the parts of each instant, where they are known."""

    stays: Mapping[str, int]
    runs: Mapping[str, int]
    least: int
    instants: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, stays: Mapping[str, int], instants: Mapping[str, Mapping[str, int]]) -> "Need":
        """Make a need that is as large as the largest of its instants.

        >>> Need.of({"weights": 8}, {"head": {"logits": 4}, "a layer": {"activations": 3}}).runs
        {'logits': 4}
        """
        runs = max(instants.values(), key=lambda parts: sum(parts.values()))
        return cls(stays, runs, sum(runs.values()), instants)

    def while_it_runs(self, part: str) -> "Need":
        """Make the need of a model whose `part` does not stay, but is there while its nodes run."""
        size = self.stays.get(part, 0)
        if not size:
            return self
        stays = {what: held for what, held in self.stays.items() if what != part}
        instants = {instant: {part: size, **parts} for instant, parts in self.instants.items()}
        return Need(stays, {part: size, **self.runs}, self.least + size, instants)

"""The recorded copies of a loader."""

import pytest
import torch

from rlgraph import notices
from rlgraph.engines.copy_plan import record


class Fused:
    """A model that keeps q, k and v in one parameter and loads them as vLLM does, into parts of it."""

    def __init__(self):
        self.qkv, self.norm = torch.zeros(6, 4), torch.zeros(4)

    def parameters(self):
        return [self.qkv, self.norm]

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "norm":
                self.norm.copy_(weight)
            else:
                self.qkv.narrow(0, "qkv".index(name) * 2, 2).copy_(weight.narrow(0, 0, 2))


class Rank:
    """One of two ranks of a tensor-parallel model, as vLLM has it: rows of some weights, columns of others, one key head that both
    ranks have, and an embedding of 5 rows padded to 8, which the head shares."""

    def __init__(self, rank):
        self.rank = rank
        self.embed, self.qk, self.out, self.norm = torch.ones(4, 4), torch.zeros(4, 4), torch.zeros(4, 2), torch.zeros(4)
        self.head = self.embed

    def parameters(self):
        return [self.embed, self.head, self.qk, self.out, self.norm]

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "embed":
                part = weight.narrow(0, 4 * self.rank, 1 if self.rank else 4)
                self.embed[: len(part)].copy_(part)
                self.embed[len(part) :].fill_(0)
            elif name == "q":
                self.qk.narrow(0, 0, 2).copy_(weight.narrow(0, 2 * self.rank, 2))
            elif name == "k":
                self.qk.narrow(0, 2, 2).copy_(weight)
            elif name == "out":
                self.out.copy_(weight.narrow(1, 2 * self.rank, 2))
            else:
                self.norm.copy_(weight)


SHAPES = {"q": (2, 4), "norm": (4,), "k": (2, 4), "v": (2, 4)}
WHOLE = {"embed": (5, 4), "q": (4, 4), "k": (2, 4), "out": (4, 4), "norm": (4,)}


def weights(seed, shapes=SHAPES):
    """Return weights that lie one behind the other in one memory."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def loaded(model):
    return [parameter.tolist() for parameter in model.parameters()]


def test_one_weight_alone_is_replayed_where_it_belongs():
    model, plain = Fused(), Fused()
    first, second = weights(0), weights(1)
    copies = record(model, first)
    copies.replay_one("k", second["k"].clone())  # as merged: a memory of its own
    plain.load_weights((first | {"k": second["k"]}).items())
    assert loaded(model) == loaded(plain)


def test_replaying_the_copies_leaves_the_model_as_its_loader_would():
    model, other = Fused(), Fused()
    plan = record(model, weights(0))
    assert plan is not None
    for seed in (1, 2):
        plan.replay(weights(seed))
        other.load_weights(weights(seed).items())
        assert loaded(model) == loaded(other)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_replays_the_copies_of_its_own_part(rank):
    model, other = Rank(rank), Rank(rank)
    plan = record(model, weights(0, WHOLE))
    assert plan is not None
    for seed in (1, 2):
        plan.replay(weights(seed, WHOLE))
        other.load_weights(weights(seed, WHOLE).items())
        assert loaded(model) == loaded(other)


def test_replaying_from_the_same_memory_sees_what_is_in_it_now():
    model, staged = Fused(), weights(0)
    plan = record(model, staged)
    plan.replay(staged)
    staged["norm"].fill_(3)
    plan.replay(staged)
    assert model.norm.tolist() == [3.0] * 4


class Scaled(Fused):
    """Computes before it copies."""

    def load_weights(self, weights):
        super().load_weights((name, weight * 2) for name, weight in weights)


class ScaledInPlace(Fused):
    """Computes on what it copied."""

    def load_weights(self, weights):
        def scaled():
            for name, weight in weights:
                yield name, weight
                self.norm.mul_(2)

        super().load_weights(scaled())


class Partial(Fused):
    """Leaves a weight out."""

    def load_weights(self, weights):
        super().load_weights((name, weight) for name, weight in weights if name != "v")


class Replaced(Fused):
    """Takes a weight as its parameter."""

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "norm":
                self.norm = weight
            else:
                super().load_weights([(name, weight)])


class ZeroedAfter(Fused):
    """Sets a part to zero that it copied before."""

    def load_weights(self, weights):
        for pair in weights:
            super().load_weights([pair])
            if pair[0] == "norm":
                self.norm[2:].fill_(0)


class ByNumber(Fused):
    """Takes a number off a weight."""

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "norm":
                self.norm.fill_(weight[0].item())
            else:
                super().load_weights([(name, weight)])


@pytest.mark.parametrize("kind", [Scaled, ScaledInPlace, Partial, Replaced, ZeroedAfter, ByNumber])
def test_a_loader_that_does_more_or_less_than_copy_cannot_be_recorded_and_that_is_said_once(kind, monkeypatch):
    monkeypatch.setattr(notices, "here", notices.Notices())
    notices.here.carried = True
    assert record(kind(), weights(0)) is None
    assert record(kind(), weights(1)) is None
    [said] = notices.here.take_new()
    assert said.startswith(f"{kind.__name__} loads weights with more than copies")

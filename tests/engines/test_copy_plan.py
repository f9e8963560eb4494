"""The recorded copies of a loader."""

import torch

from rlgraph.engines.copy_plan import record


class Fused:
    """A model that keeps q, k and v in one parameter and loads them as vLLM does, into parts of it."""

    def __init__(self):
        self.qkv, self.norm = torch.zeros(6, 4), torch.zeros(4)

    def load(self, weights):
        for name, weight in weights:
            if name == "norm":
                self.norm.copy_(weight)
            else:
                self.qkv.narrow(0, "qkv".index(name) * 2, 2).copy_(weight.narrow(0, 0, 2))


def weights(seed):
    flat = torch.randn(28, generator=torch.Generator().manual_seed(seed))
    return {"q": flat[:8].view(2, 4), "norm": flat[8:12], "k": flat[12:20].view(2, 4), "v": flat[20:28].view(2, 4)}


def loaded(model):
    return [*model.qkv.flatten().tolist(), *model.norm.tolist()]


def test_replaying_the_copies_leaves_the_model_as_its_loader_would():
    model, other = Fused(), Fused()
    plan = record(model.load, weights(0))
    assert plan is not None
    for seed in (1, 2):
        plan.replay(weights(seed))
        other.load(weights(seed).items())
        assert loaded(model) == loaded(other)


def test_replaying_from_the_same_memory_sees_what_is_in_it_now():
    model, staged = Fused(), weights(0)
    plan = record(model.load, staged)
    plan.replay(staged)
    staged["norm"].fill_(3)
    plan.replay(staged)
    assert model.norm.tolist() == [3.0] * 4


def test_a_loader_that_computes_cannot_be_recorded():
    class Scaled(Fused):
        def load(self, weights):
            super().load((name, weight * 2) for name, weight in weights)

    assert record(Scaled().load, weights(0)) is None


def test_a_loader_that_leaves_something_out_cannot_be_recorded():
    class Partial(Fused):
        def load(self, weights):
            super().load((name, weight) for name, weight in weights if name != "v")

    assert record(Partial().load, weights(0)) is None

"""Write trl.json: what TRL 1.16.0's own trainers compute on small random batches. Runs in an environment with TRL: see the end.

Each case has its inputs, the loss and its gradient, as TRL gives them. The trainers' methods run on stand-ins of trainer and model: the
model returns log-probs or logits that are given, so that the loss and the gradient in these are TRL's alone.

    python -m venv trl && trl/bin/pip install trl==1.16.0 && trl/bin/python tests/oracle/trl_losses.py
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import trl
from transformers import modeling_outputs
from trl.experimental.async_distillation.async_distillation_trainer import _chunked_jsd_loss
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd import gkd_trainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_trainer import SFTTrainer

FILE = Path(__file__).with_name("trl.json")
ROWS, WIDTH, VOCAB = 6, 5, 7
Case = dict[str, Any]


class Accelerator:
    """One process."""

    device, num_processes, parallelism_config = torch.device("cpu"), 1, None

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    gather_for_metrics = gather


def trainer(**settings: Any) -> Any:
    """A stand-in with what the losses read of their trainer."""
    common = {
        "accelerator": Accelerator(),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
    }
    return SimpleNamespace(**(common | settings))


def model_of(log_probs: torch.Tensor) -> Any:
    """A model whose fused head gives log-probs `[B, T]` of the labels behind the first token, 0 where there is none."""

    def forward(labels: torch.Tensor, **inputs: Any) -> Any:
        mask = labels[:, 1:] != -100
        zeros = torch.zeros_like(log_probs)
        found = {"log_probs": torch.where(mask, log_probs, 0.0), "label_mask": mask, "is_top1": mask}
        return SimpleNamespace(**found, entropy=zeros, mean_logits=zeros, log_sum_sq_probs=zeros)

    return forward


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw masks with the first token in them, log-probs of the policy, and those of the reference: `[B, T]` each."""
    ends = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    mask = torch.arange(WIDTH) < ends[:, None]
    log_probs, reference = (-3 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) - 0.05 for _ in range(2))
    return mask, log_probs, reference


def case(name: str, options: Case, loss: torch.Tensor, of: torch.Tensor, **inputs: torch.Tensor) -> Case:
    (gradient,) = torch.autograd.grad(loss, of)
    return {
        "name": name,
        "options": options,
        "inputs": {key: value.tolist() for key, value in inputs.items()},
        "loss": loss.item(),
        "gradient": gradient.tolist(),
    }


def halves(rows: torch.Tensor) -> torch.Tensor:
    """Order rows as TRL has them, all chosen and then all rejected, which lie side by side here."""
    return torch.cat([rows[0::2], rows[1::2]])


def inputs_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make the token ids of a batch with one token of a prompt, of which the model needs the shape alone."""
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], dim=1)
    seen = torch.cat([torch.ones(len(mask), 1, dtype=torch.long), mask.long()], dim=1)
    return {"input_ids": torch.ones(whole.shape, dtype=torch.long), "attention_mask": seen, "completion_mask": whole.long()}


def pairs(generator: torch.Generator) -> Iterator[Case]:
    mask, log_probs, reference = batch(generator)
    given = {"response_mask": mask, "log_probs": log_probs, "ref_log_probs": reference}
    yield from losses_of_pairs(given, (0.1, 0.5), ((2.0, 0.5), (2.5, 1.0)), (0.1, 0.7))


def more_pairs(generator: torch.Generator) -> Iterator[Case]:
    """Other settings, of the likely and the unlikely: half of the log-probs are within 0.01 of 0, and half are a hundred times as far."""
    mask, log_probs, reference = batch(generator)
    far = torch.where(torch.rand(mask.shape, generator=generator) < 0.5, 1e-3, 10.0).to(log_probs)
    given = {"response_mask": mask, "log_probs": far * log_probs, "ref_log_probs": reference}
    yield from losses_of_pairs(given, (0.01, 2.0), ((10.0, 0.0), (1.0, 5.0)), (1.0,))


def losses_of_pairs(
    given: dict[str, torch.Tensor], betas: tuple[float, ...], simpo: tuple[tuple[float, float], ...], odds: tuple[float, ...]
) -> Iterator[Case]:
    mask, log_probs, reference = given.values()
    for name, kind in (("DPO", "sigmoid"), ("IPO", "ipo")):
        for beta in betas:
            own = log_probs.clone().requires_grad_()
            stand_in = trainer(
                ld_alpha=None,
                precompute_ref_logps=False,
                ref_model=model_of(halves(reference)),
                f_divergence_type="reverse_kl",
                loss_types=[kind],
                loss_weights=[1.0],
                beta=beta,
                use_weighting=False,
                args=SimpleNamespace(gradient_checkpointing_kwargs=None),
            )
            stand_in.model.is_gradient_checkpointing = False
            loss = DPOTrainer._compute_loss(stand_in, model_of(halves(own)), inputs_of(halves(mask)), False)
            yield case(name, {"beta": beta}, loss, own, **given)
    for beta, gamma in simpo:
        own = log_probs.clone().requires_grad_()
        sums = (own * mask).sum(-1) / mask.sum(-1)
        stand_in = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=gamma, beta=beta, label_smoothing=0.0)
        losses, *_ = CPOTrainer.cpo_loss(stand_in, sums[0::2], sums[1::2])
        yield case("SimPO", {"beta": beta, "gamma": gamma}, losses.mean(), own, **given)
    for beta in odds:
        yield orpo(beta, given)


def orpo(beta: float, given: dict[str, torch.Tensor]) -> Case:
    """ORPO's loss from the forward pass on; its model's logits have two tokens, of which 1 has the log-prob that is given."""
    mask, own = given["response_mask"], given["log_probs"].clone().requires_grad_()
    inputs = inputs_of(mask)
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    logits = torch.stack([torch.log1p(-own.exp()), own], dim=-1)
    logits = halves(torch.cat([logits, torch.zeros(ROWS, 1, 2, dtype=own.dtype)], dim=1))
    columns = {}
    for kind, rows in (("chosen", slice(0, None, 2)), ("rejected", slice(1, None, 2))):
        columns |= {
            f"{kind}_input_ids": inputs["input_ids"][rows],
            f"{kind}_attention_mask": inputs["attention_mask"][rows],
            f"{kind}_labels": labels[rows],
        }
    stand_in = trainer(beta=beta, padding_value=0)
    stand_in.concatenated_inputs = ORPOTrainer.concatenated_inputs
    stand_in.get_batch_logps = ORPOTrainer.get_batch_logps
    stand_in.concatenated_forward = lambda model, batch: ORPOTrainer.concatenated_forward(stand_in, model, batch)
    stand_in.odds_ratio_loss = lambda chosen, rejected: ORPOTrainer.odds_ratio_loss(stand_in, chosen, rejected)

    def model(ids: torch.Tensor, **options: Any) -> Any:
        return modeling_outputs.CausalLMOutput(logits=logits)

    loss, _ = ORPOTrainer.get_batch_loss_metrics(stand_in, model, columns)
    return case("ORPO", {"beta": beta}, loss, own, **given)


def kto(generator: torch.Generator) -> Iterator[Case]:
    yield from losses_of_kto(generator, torch.tensor([True, False, True, True, False, True]))


def one_kind(generator: torch.Generator) -> Iterator[Case]:
    """Batches of good responses alone, and of bad ones alone."""
    for good in (True, False):
        yield from losses_of_kto(generator, torch.tensor([good] * ROWS))


def losses_of_kto(generator: torch.Generator, labels: torch.Tensor) -> Iterator[Case]:
    mask, log_probs, reference = batch(generator)
    other_mask, others, other_reference = batch(generator)
    for shift in (0.0, 4.0):  # z is 0 at first, and then above
        for beta, good, bad in ((0.1, 1.0, 1.0), (0.5, 1.0, 1.5)):
            own = log_probs.clone().requires_grad_()
            stand_in = trainer(
                calculate_KL=True,
                precompute_ref_logps=False,
                ref_model=None,
                beta=beta,
                loss_type="kto",
                desirable_weight=good,
                undesirable_weight=bad,
                args=SimpleNamespace(gradient_checkpointing_kwargs=None),
            )
            stand_in.model.is_gradient_checkpointing = False
            stand_in.ref_model = model_of(reference)
            sums = iter([((others + shift) * other_mask).sum(-1), (other_reference * other_mask).sum(-1)])
            stand_in._compute_kl_logps = lambda model, batch, sums=sums: next(sums)
            loss = KTOTrainer._compute_loss(stand_in, model_of(own), inputs_of(mask) | {"label": labels}, False)
            yield case(
                "KTO",
                {"beta": beta, "desirable": good, "undesirable": bad},
                loss,
                own,
                response_mask=mask,
                log_probs=log_probs,
                ref_log_probs=reference,
                labels=labels,
                other_mask=other_mask,
                other_log_probs=others + shift,
                other_ref_log_probs=other_reference,
            )


def supervised(generator: torch.Generator) -> Iterator[Case]:
    mask, log_probs, _ = batch(generator)
    for name in ("nll", "dft"):
        for count in (None, 40):  # the tokens of the whole batch, of which this is a part
            own = log_probs.clone().requires_grad_()
            args = SimpleNamespace(loss_type=name, average_tokens_across_devices=False)
            stand_in = trainer(args=args, compute_loss_func=None, label_smoother=None)
            inputs = inputs_of(mask)
            inputs["labels"] = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
            loss = SFTTrainer.compute_loss(stand_in, model_of(own), inputs, num_items_in_batch=count)
            yield case("SFT", {"dft": name == "dft", "tokens": count}, loss, own, response_mask=mask, log_probs=log_probs)


def rewards(generator: torch.Generator) -> Iterator[Case]:
    scores = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    margins = torch.rand(ROWS // 2, generator=generator, dtype=torch.float64)
    for margin in (False, True):
        for center in (None, 0.01):
            own = scores.clone().requires_grad_()
            stand_in = trainer(args=SimpleNamespace(center_rewards_coefficient=center))
            inputs = {"attention_mask": torch.ones(ROWS, 1)} | ({"margin": margins} if margin else {})
            model = lambda own=own, **inputs: SimpleNamespace(logits=halves(own)[:, None])  # noqa: E731
            loss = RewardTrainer.compute_loss(stand_in, model, inputs)
            yield case("BradleyTerry", {"margin": margin, "center": center or 0.0}, loss, own, scores=scores, margins=margins)


def distillation(generator: torch.Generator) -> Iterator[Case]:
    student, teacher = (2 * torch.randn(3, 4, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [True, True, True, True]])
    labels = torch.zeros(mask.shape, dtype=torch.long).masked_fill(~mask, -100)
    for beta in (0.0, 0.1, 0.5, 1.0):
        for temperature in (1.0, 2.0):
            own = student.clone().requires_grad_()
            loss = GKDTrainer.generalized_jsd_loss(own, teacher, labels, beta=beta, temperature=temperature)
            options = {"beta": beta, "temperature": temperature}
            yield case("GKD", options, loss, own, response_mask=mask, student=student, teacher=teacher)


def top_tokens(generator: torch.Generator) -> Iterator[Case]:
    """Distributions over the teacher's top k tokens and one for all others. The hidden states are the logits: the head is the identity."""
    student, teacher = (2 * torch.randn(3, 4, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [True, True, True, True]])
    top, ids = teacher.log_softmax(-1).topk(VOCAB - 1, -1)
    for beta in (0.0, 0.3, 1.0):
        for k in (1, 3, VOCAB - 1):
            own = student.clone().requires_grad_()
            valid = torch.ones(int(mask.sum()), k, dtype=torch.bool)
            head = torch.eye(VOCAB, dtype=torch.float64)
            taught = (ids[mask][:, :k], top[mask][:, :k], valid)
            loss = _chunked_jsd_loss(own[mask], head, None, 1.0, None, *taught, beta, 1.0, True, None, 0, 2)[0] / mask.sum()
            yield case("GKD top", {"beta": beta, "k": k}, loss, own, response_mask=mask, student=student, teacher=teacher)


def on_policy_share(generator: torch.Generator) -> Iterator[Case]:
    """GKD's training step, averaged over what it draws: with the probability lambda it replaces the examples by the student's responses."""
    student, teacher = (2 * torch.randn(4, 4, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    ends = torch.tensor([[4], [2], [1], [3]])  # of two responses of the student, and of two examples
    mask = torch.arange(4) < ends
    labels = torch.zeros(mask.shape, dtype=torch.long).masked_fill(~mask, -100)
    responses, examples = slice(0, 2), slice(2, 4)
    for share in (0.25, 0.5, 0.75):
        for beta in (0.0, 0.5):
            own = student.clone().requires_grad_()
            stand_in = GKDTrainer.__new__(GKDTrainer)
            stand_in.lmbda, stand_in.seq_kd, stand_in.generation_kwargs = share, False, {}
            stand_in.accelerator, stand_in.args, stand_in.generation_config = (
                None,
                SimpleNamespace(gradient_checkpointing_kwargs=None),
                None,
            )
            stand_in.generate_on_policy_outputs = lambda *given: (responses, None, None)

            def jsd(self: Any, model: Any, inputs: Any, count: Any, own: torch.Tensor = own, beta: float = beta) -> torch.Tensor:
                rows = inputs["input_ids"]
                return GKDTrainer.generalized_jsd_loss(own[rows], teacher[rows], labels[rows], beta=beta)

            losses = []
            for drawn in (0.1, 0.35, 0.6, 0.85):  # the middle of each quarter: the share lambda of them is at most lambda
                with (
                    mock.patch.object(gkd_trainer.random, "random", return_value=drawn),
                    mock.patch.object(gkd_trainer, "unwrap_model_for_generation", return_value=nullcontext()),
                    mock.patch.object(SFTTrainer, "training_step", jsd),
                ):
                    losses.append(GKDTrainer.training_step(stand_in, None, {"input_ids": examples}))
            loss = torch.stack(losses).mean()
            options = {"lambda": share, "beta": beta}
            yield case("GKD lambda", options, loss, own, response_mask=mask, student=student, teacher=teacher)


FAMILIES = (pairs, kto, supervised, rewards, distillation)
ADDED = (more_pairs, one_kind, top_tokens, on_policy_share)  # with a seed of their own, so that the cases above stay as they are

if __name__ == "__main__":
    cases = [
        made
        for seed, each in ((11, FAMILIES), (12, ADDED))
        for seeded in [torch.Generator().manual_seed(seed)]
        for f in each
        for made in f(seeded)
    ]
    FILE.write_text(json.dumps({"trl": trl.__version__, "torch": torch.__version__, "cases": cases}) + "\n")
    print(f"{FILE}: {len(cases)} cases")

"""Write trl_grpo.json: the first two losses of TRL 1.16.0's GRPOTrainer, with what they are computed from, for some configurations.

A tiny model is trained for two steps on one rollout, whose responses are drawn at random. Runs in an environment with TRL and rlgraph:

    python -m venv trl && trl/bin/pip install trl==1.16.0 && PYTHONPATH=. trl/bin/python tests/oracle/trl_grpo.py
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlgraph.engines.hf.pretrained import tiny_model

LENGTH, GROUP, ROWS = 8, 4, 8
CASES: tuple[dict[str, Any], ...] = (
    {"beta": 0.04, "use_bias_correction_kl": False, "epsilon_high": 0.28, "mask_truncated_completions": True},
    {"loss_type": "grpo", "epsilon": 0.001, "delta": 1.01},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.0003, "epsilon_high": 0.0004},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo", "sapo_temperature_neg": 1.5},
)


class Recorded(GRPOTrainer):
    """Draws its responses, and notes each loss with what it is computed from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.noted: list[dict[str, Any]] = []  # in the order of TRL, which shuffles the rows of a rollout for its steps
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        draw = random.Random(0)
        drawn = [[draw.randrange(1, 250) for _ in range(draw.randint(1, LENGTH + 2))] for _ in prompt_ids]
        return [ids[:LENGTH] if len(ids) >= LENGTH else [*ids, self._tokenizer.eos_token_id] for ids in drawn], None

    def _calculate_rewards(self, *args: Any) -> Any:
        self.rewards = super()._calculate_rewards(*args)
        return self.rewards

    def _generate_and_score_completions(self, *args: Any) -> Any:
        found = super()._generate_and_score_completions(*args)
        self.scored = {"rewards": self.rewards[:, 0].tolist(), "advantages": found["advantages"].tolist()}
        return found

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.log_probs = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        found = {
            "response_mask": inputs["completion_mask"],
            "log_probs": self.log_probs,
            "old_log_probs": inputs["old_per_token_logps"],
            "advantages": inputs["advantages"],
            **({"ref_log_probs": inputs["ref_per_token_logps"]} if self.beta else {}),
        }
        self.noted.append({name: value.tolist() for name, value in found.items()} | {"loss": loss.item()})
        return loss


def first_steps(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    rows = Dataset.from_list([{"prompt": f"{each} + 1 ="} for each in range(ROWS // GROUP)])
    args = GRPOConfig(
        **options,
        output_dir=str(folder / "out"),
        per_device_train_batch_size=ROWS,
        num_generations=GROUP,
        num_iterations=2,
        max_completion_length=LENGTH,
        max_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        shuffle_dataset=False,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    reward = lambda completions, **_: [float(len(text) % 3) for text in completions]  # noqa: E731
    trainer = Recorded(model, reward, args, train_dataset=rows)
    trainer.train()
    return {"options": options, **trainer.scored, "losses": trainer.noted}


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tiny_model(folder / "model", chat=True, context=1024)
        found = [first_steps(options, folder) for options in CASES]
    Path(__file__).with_suffix(".json").write_text("[\n" + ",\n".join(json.dumps(each) for each in found) + "\n]\n")


if __name__ == "__main__":
    main()

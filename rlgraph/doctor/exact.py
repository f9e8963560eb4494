"""`rlgraph doctor exact MODEL`: which operation gives other numbers in a trainer with exact=True than in the engine."""

from dataclasses import asdict, dataclass

import msgspec
import torch

from rlgraph.engines.exact.diagnosis import LOG_PROBS, ComparedOperation, compare
from rlgraph.engines.exact.model import check_family
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.render.tables import aligned

MEANING = {  # by the name below its layer
    "embedding": "the embedding",
    "norm": "a norm",
    "qkv": "the product that gives queries, keys and values",
    "q_norm": "the norm of queries",
    "k_norm": "the norm of keys",
    "query": "the rotation of queries",
    "key": "the rotation of keys",
    "attention": "attention, and on a CPU rotation",
    "output": "the product after attention",
    "mlp_norm": "the norm before the MLP, or the sum before it",
    "gate_up": "the product that gives gate and up",
    "activation": "SiLU times up",
    "down": "the product after it",
    LOG_PROBS: "the product of the head, the temperature or the log-softmax",
}


@dataclass(frozen=True)
class ExactDiagnosis:
    """All operations of a model, in the order of their computation; prints as a table of those that differ."""

    model: str
    device: str
    operations: tuple[ComparedOperation, ...]

    @property
    def first(self) -> ComparedOperation | None:
        """The first operation that gives other numbers: what comes after it has other inputs."""
        return next((operation for operation in self.operations if not operation.equal), None)

    def __str__(self) -> str:
        rows = sum(o.decoded_rows for o in self.operations if o.name == LOG_PROBS)
        counted = (
            f"{self.model} on {'a GPU' if self.device == 'cuda' else 'a CPU'}: {len(self.operations)} operations, {rows} sampled tokens"
        )
        if self.first is None:
            return f"{counted}: engine and trainer are equal in every bit"
        meaning = MEANING[self.first.name.rsplit(".", 1)[-1]]
        table = [
            [o.name, f"{o.prompt_differs} of {o.prompt_rows}", f"{o.decoded_differs} of {o.decoded_rows}", f"{o.most:.1e}"]
            for o in self.operations
            if not o.equal
        ]
        lines = aligned(["operation", "rows of prompts", "decoded rows", "by up to"], table)
        return "\n".join([f"{counted}, of which {len(table)} differ", f"first: {self.first.name}, {meaning}", "", *lines])

    def to_json(self) -> str:
        """Write the diagnosis as JSON: `model`, `device`, `first` (a name or null) and `operations` with their counts."""
        found = {"model": self.model, "device": self.device, "first": self.first.name if self.first else None}
        return msgspec.json.format(msgspec.json.encode(found | {"operations": [asdict(o) for o in self.operations]}), indent=1).decode()


def diagnose_exact(folder: str) -> ExactDiagnosis:
    """Compare engine and trainer on this machine, on a GPU if there is one; takes about a minute. Raises DataError for a folder without
    a model or of a family that is not proven to be exact.
    """
    check_family(folder, check_model(folder).model_type)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ExactDiagnosis(folder, device, tuple(compare(folder, device)))

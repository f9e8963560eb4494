"""A process that compares an exact trainer with what an engine was seen to compute, also with one operation put back at a time.

`python exact_doctor_process.py FOLDER OUT`; the engine runs in a process of its own before.
"""

import subprocess
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from programs.exact_process import own_rotations, plain_attention, plain_rotation
from support.trainer_engines import fsdp_engine
from torch.nn.functional import linear

from rlgraph.engines.exact import cpu
from rlgraph.engines.exact.diagnosis import compare_operations
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.hf.backbone import backbone_of
from rlgraph.values.optimizers import AdamW


def other_norm(self: Any, states: torch.Tensor) -> torch.Tensor:
    """A norm that sums from the end."""
    mean = (states.flip(-1).cumsum(-1)[..., -1:] * 0 + states.pow(2).flip(-1).cumsum(-1)[..., -1:]) / states.shape[-1]
    out: torch.Tensor = self.weight * (states * torch.rsqrt(mean + self.variance_epsilon))
    return out


def main(folder: str, out: Path) -> None:
    torch.set_num_threads(1)
    own_rotations()
    command = [sys.executable, "-m", "rlgraph.engines.exact.diagnosis", "engine", folder, "cpu", str(out)]
    subprocess.run(command, check=True, timeout=250)
    seen = torch.load(out / "seen.pt")
    head = PolicyHead(folder)
    engine = fsdp_engine(head, optimizer=AdamW(), dtype=torch.float32, exact=True)

    def first() -> str | None:
        return next((operation.name for operation in compare_operations(head, engine, seen) if not operation.equal), None)

    found: dict[str, Any] = {"all": [o.name for o in compare_operations(head, engine, seen)], "exact": first()}
    last = head.layers[-1]
    own_forward = last.post_attention_layernorm.forward
    last.post_attention_layernorm.forward = MethodType(other_norm, last.post_attention_layernorm)
    found["norm"] = first()
    last.post_attention_layernorm.forward = own_forward
    places: dict[str, tuple[Any, str, Any]] = {
        "linear": (cpu.kernels, "onednn_mm", lambda packed, rows, bias: from_the_end(rows, weight_of(head, packed), bias)),
        "attention": (cpu, "attend_in_order", plain_attention),
        "rotation": (cpu, "rotate_heads", plain_rotation),
        "log-softmax": (torch.Tensor, "log_softmax", lambda scaled, dim: scaled - scaled.logsumexp(dim, keepdim=True)),
    }
    for name, (place, attribute, other) in places.items():
        own = getattr(place, attribute)
        setattr(place, attribute, other)
        found[name] = first()
        setattr(place, attribute, own)
    found["exact again"] = first()
    torch.save(found, out / "found.pt")
    engine.close()


def from_the_end(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(rows.flip(-1), weight.flip(-1), bias)


def weight_of(head: Any, packed: Any) -> torch.Tensor:
    """The matrix that was packed."""
    module = next(m for m in [*backbone_of(head.model).modules(), head.model.lm_head] if getattr(m, "packed", None) is packed)
    weight: torch.Tensor = module.weight.detach()
    return weight.to_local() if hasattr(weight, "to_local") else weight


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""`rlgraph doctor exact`: what an engine and an exact trainer compute for the same texts, operation by operation, each in a process.

python -m rlgraph.engines.exact.diagnosis engine FOLDER DEVICE OUT    # samples, and keeps what the engine computed
python -m rlgraph.engines.exact.diagnosis trainer FOLDER DEVICE OUT   # computes the same texts, and compares
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from rlgraph.columns import Columns
from rlgraph.engines.exact.rules import check
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.engines.precision import leave_out_broken_amx
from rlgraph.errors import DataError

# What the operations of a model gave for some texts, in an engine and in a trainer, by the same names: to find the first that differs.
#
# Names are `embedding`; `3.norm`, `3.qkv`, … of layer 3; and `norm` at the end. Each is `[tokens, width]`.

LOG_PROBS = "log_probs"
OF_LAYER = {  # in the order of their computation, each with its meaning
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
}
MEANING = OF_LAYER | {"embedding": "the embedding", LOG_PROBS: "the product of the head, the temperature or the log-softmax"}
MODULES = {  # by their path below a layer; vLLM merges those of Transformers whose number follows a slash
    "input_layernorm": "norm",
    "self_attn.qkv_proj": "qkv",
    "self_attn.q_proj": "qkv/0",
    "self_attn.k_proj": "qkv/1",
    "self_attn.v_proj": "qkv/2",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_up_proj": "gate_up",
    "mlp.gate_proj": "gate_up/0",
    "mlp.up_proj": "gate_up/1",
    "mlp.down_proj": "down",
}
INPUTS = {"self_attn.o_proj": "attention", "mlp.down_proj": "activation"}


def names(layers: int) -> list[str]:
    """All names of a model, in the order of its computation."""
    return ["embedding", *(f"{layer}.{name}" for layer in range(layers) for name in OF_LAYER), "norm"]


class Witness:
    """Keeps what the modules of a model give, pass by pass, from now until `leave`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.passes: list[dict[str, torch.Tensor]] = []
        self.positions: list[torch.Tensor] = []
        self._leading = False
        self.layer, self._hooks = -1, list[Any]()
        for path, module in model.named_modules():
            self._watch(path, module)

    def _watch(self, path: str, module: torch.nn.Module) -> None:
        number, _, below = path.partition("layers.")[2].partition(".")
        if path.endswith("embed_tokens"):
            self._keep(module, "embedding")
        elif path.endswith(".norm") and not number:
            self._keep(module, "norm")
        elif path.endswith("rotary_emb") and hasattr(module, "cos_sin_cache"):
            self._hooks.append(module.register_forward_hook(self._record_rotation))
        if below == "self_attn":
            self._hooks.append(module.register_forward_pre_hook(lambda module, given: self._at(int(number))))
        if below in MODULES:
            self._keep(module, f"{number}.{MODULES[below]}")
        if below in INPUTS:
            name = f"{number}.{INPUTS[below]}"
            self._hooks.append(module.register_forward_pre_hook(lambda module, given: self.add(name, given[0])))

    def _at(self, layer: int) -> None:
        self.layer = layer

    def _keep(self, module: torch.nn.Module, name: str) -> None:
        self._hooks.append(
            module.register_forward_hook(lambda module, given, out: self.add(name, out[0] if isinstance(out, tuple) else out))
        )

    def _record_rotation(self, module: torch.nn.Module, given: Any, out: Any) -> None:
        for name, states in zip(("query", "key"), out, strict=True):
            self.add(f"{self.layer}.{name}", states)

    def add(self, name: str, states: torch.Tensor) -> None:
        """Keep the states `[…, tokens, …]` of an operation."""
        if name == "embedding":
            self.passes.append({})
            self._leading = states.dim() == 3  # a trainer's states are [1, tokens, …]
        if self.passes:
            rows = states.detach()[0] if self._leading else states.detach()
            self.passes[-1][name] = rows.reshape(len(rows), -1).clone()

    def leave(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()


def watch_positions(model: torch.nn.Module, witness: Witness) -> None:
    """Note the positions of the tokens of each pass of vLLM's model."""

    def note(module: Any, given: Any, named: dict[str, Any]) -> None:
        witness.positions.append((named["positions"] if "positions" in named else given[1]).detach().clone())

    witness._hooks.append(model.register_forward_pre_hook(note, with_kwargs=True))


@contextmanager
def watch_rotation(attention: Any, witness: Witness) -> Iterator[None]:
    """Keep what the attention modules of a trainer's family rotate. On a CPU an exact one rotates elsewhere, so nothing is kept."""
    module = sys.modules[type(attention).__module__]
    own = module.apply_rotary_pos_emb

    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        found = own(query, key, cos, sin)
        if not sin.is_floating_point():
            for name, states in zip(("query", "key"), found, strict=True):
                witness.add(f"{witness.layer}.{name}", states.transpose(1, 2))
        return found

    vars(module)["apply_rotary_pos_emb"] = rotate
    try:
        yield
    finally:
        vars(module)["apply_rotary_pos_emb"] = own


def of_text(witness: Witness, prompt: int, tokens: int) -> dict[str, torch.Tensor]:
    """Put together what an engine computed of one text, a prompt of that length and so many tokens: first the prompt, then each token.

    The texts of the passes have prompts of lengths of their own, further apart than they have tokens.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    for at, (positions, found) in enumerate(zip(witness.positions, witness.passes, strict=True)):
        rows = _prompt_rows(positions, prompt) if at == 0 else ((positions >= prompt) & (positions < prompt + tokens)).nonzero()[:, 0]
        for name, states in found.items():
            parts.setdefault(name, []).append(states[rows[rows < len(states)]])
    return {name: torch.cat(rows) for name, rows in parts.items()}


def _prompt_rows(positions: torch.Tensor, prompt: int) -> torch.Tensor:
    begins = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
    for start, end in pairwise(begins):
        if end - start == prompt and int(positions[start + prompt - 1]) == prompt - 1:
            return torch.arange(start, end, device=positions.device)
    raise ValueError(f"no prompt of {prompt} tokens in the first pass, whose texts begin at {begins}")


def merge_products(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the parts of merged products of a trainer's pass together, as vLLM has them."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(found):
        parts.setdefault(name.partition("/")[0], []).append(found[name])
    return {name: torch.cat(states, dim=-1) for name, states in parts.items()}


LENGTHS = (9, 40, 90)  # of prompts: further apart than texts have tokens
TOKENS = 8
FIRST_ID, LAST_ID = 5, 200  # that every model has
LIMIT_S = 600.0  # for each of the two
HEAD = ("operation", "rows of prompts", "decoded rows", "by up to")


@dataclass(frozen=True)
class ComparedOperation:
    """Rows of prompts and of decoded tokens that an operation gave other numbers for in the trainer, and by how much."""

    name: str
    prompt_differs: int
    prompt_rows: int
    decoded_differs: int
    decoded_rows: int
    most: float

    @property
    def equal(self) -> bool:
        return self.prompt_differs + self.decoded_differs == 0


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

    @property
    def equal(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        rows, place = sum(o.decoded_rows for o in self.operations if o.name == LOG_PROBS), "a GPU" if self.device == "cuda" else "a CPU"
        counted = f"{self.model} on {place}: {len(self.operations)} operations, {rows} sampled tokens"
        if self.first is None:
            return f"{counted}: engine and trainer are equal in every bit"
        table = [
            (o.name, f"{o.prompt_differs} of {o.prompt_rows}", f"{o.decoded_differs} of {o.decoded_rows}", f"{o.most:.1e}")
            for o in self.operations
            if not o.equal
        ]
        lines = [f"{name:16}{prompt:17}{decoded:14}{most}" for name, prompt, decoded, most in (HEAD, *table)]
        meaning = MEANING[self.first.name.rsplit(".", 1)[-1]]
        return "\n".join([f"{counted}, of which {len(table)} differ", f"first: {self.first.name}, {meaning}", "", *lines])

    def to_json(self) -> str:
        """Write the diagnosis as JSON: `model`, `device`, `first` (a name or null) and `operations` with their counts."""
        found = {"model": self.model, "device": self.device, "first": self.first.name if self.first else None}
        return msgspec.json.format(msgspec.json.encode(found | {"operations": self.operations}), indent=1).decode()


def diagnose(folder: str) -> ExactDiagnosis:
    """Compare engine and trainer on this machine, on a GPU if there is one; takes about a minute. Raises DataError for a folder without
    a model or of a family that is not proven to be exact.
    """
    check(folder, check_model(folder).model_type, "float32")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ExactDiagnosis(folder, device, tuple(compare(folder, device)))


def compare(folder: str, device: str) -> list[ComparedOperation]:
    """Run both processes, and give the operations of the model in the order of their computation. Raises DataError if one of them fails."""
    with tempfile.TemporaryDirectory() as out:
        for side in ("engine", "trainer"):
            command = [sys.executable, "-m", "rlgraph.engines.exact.diagnosis", side, folder, device, out]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            if done.returncode != 0:
                last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
                raise DataError(f"'{folder}': the {side} of the comparison ended with code {done.returncode}: {last}")
        return msgspec.json.decode((Path(out) / "found.json").read_bytes(), type=list[ComparedOperation])


def prompts() -> list[list[int]]:
    """The texts that are compared."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(FIRST_ID, LAST_ID, (length,), generator=draw).tolist() for length in LENGTHS]


def engine_side(folder: str, device: str, out: Path) -> None:
    """Sample with the engine, and keep what its operations gave."""
    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.sampling import Sampling

    more: dict[str, Any] = {"threads": 1, "dtype": "float32"}
    if device == "cuda":
        eager = {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}, "enforce_eager": True}  # what is recorded calls no module
        more = {"dtype": "bfloat16", "engine_args": eager}
    engine = VllmEngine(folder, max_model_len=256, kv_cache_bytes=1 << 30, max_sequences=8, exact=True, **more)
    model = engine.model()
    witness = Witness(model)
    watch_positions(model, witness)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    responses = engine.generate(prompts(), sampling, list(range(len(LENGTHS))))
    witness.leave()
    found = [
        (list(response.tokens), list(response.log_probs), {name: rows.cpu() for name, rows in of_text(witness, length, TOKENS).items()})
        for length, response in zip(LENGTHS, responses, strict=True)
    ]
    torch.save(found, out / "seen.pt")
    engine.close()


def trainer_side(folder: str, device: str, out: Path) -> None:
    """Compute the same texts with the trainer, and compare each operation."""
    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.values.trainer import TrainerSettings

    torch.set_num_threads(1)
    head = PolicyHead(folder)
    engine = FsdpEngine(head, TrainerSettings(exact=True), device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    found = compare_operations(head, engine, torch.load(out / "seen.pt", weights_only=True))
    (out / "found.json").write_bytes(msgspec.json.encode(found))
    engine.close()


def compare_operations(
    head: Any, engine: Any, seen: list[tuple[list[int], list[float], dict[str, torch.Tensor]]]
) -> list[ComparedOperation]:
    """Compare what a trainer computes of the texts with what the engine was seen to compute."""
    order = [*names(len(head.layers)), LOG_PROBS]
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor, float]]] = {}
    for prompt, (tokens, log_probs, engines) in zip(prompts(), seen, strict=True):
        trainers = _seen_in_trainer(head, engine, _batch(prompt, tokens))
        both = engines | {LOG_PROBS: torch.tensor(log_probs)[:, None]}
        for name in (name for name in order if name in trainers and name in both):
            border = 0 if name == LOG_PROBS else len(prompt)
            found.setdefault(name, []).append(_differs(trainers[name], both[name], border))
    return [_add_up(name, found[name]) for name in order if name in found]


def _seen_in_trainer(head: Any, engine: Any, batch: Columns) -> dict[str, torch.Tensor]:
    witness = Witness(head.model)
    with watch_rotation(head.layers[0].self_attn, witness):
        log_probs = engine.scores(batch)[0]
    witness.leave()
    (seen,) = witness.passes
    return merge_products({name: rows.cpu() for name, rows in seen.items()}) | {LOG_PROBS: log_probs[:, None]}


def _batch(prompt: list[int], tokens: list[int]) -> Columns:
    columns = {"prompts": torch.tensor([prompt]), "responses": torch.tensor([tokens])}
    return columns | {f"{name}_mask": torch.ones_like(columns[f"{name}s"]).bool() for name in ("prompt", "response")}


def _differs(own: torch.Tensor, other: torch.Tensor, border: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    rows = min(len(own), len(other))  # an engine may have computed a token after the last one
    differ = (own[:rows] != other[:rows]).any(-1)
    return differ[:border], differ[border:], (own[:rows].float() - other[:rows].float()).abs().max().item()


def _add_up(name: str, texts: list[tuple[torch.Tensor, torch.Tensor, float]]) -> ComparedOperation:
    prompts, decoded, most = zip(*texts, strict=True)
    prompt, later = torch.cat(prompts), torch.cat(decoded)
    return ComparedOperation(name, int(prompt.sum()), len(prompt), int(later.sum()), len(later), max(most))


if __name__ == "__main__":
    leave_out_broken_amx()
    {"engine": engine_side, "trainer": trainer_side}[sys.argv[1]](sys.argv[2], sys.argv[3], Path(sys.argv[4]))

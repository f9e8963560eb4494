"""Adapters: the projections of a model with them, frozen matrices of 4 bits, PEFT's folders, and a frozen base that several models share.

All models of one process share a frozen base, or all processes of a host. Processes share an unnamed segment of memory, which the kernel
frees with the last process that maps it, however that ends. The first that loads makes it and leaves a note in the job's folder; the
others open the segment by that process's handle. Weights lie at multiples of 64 bytes, as PyTorch's own do: products with a vector have
other bits at other addresses, so the files cannot be mapped as they are.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import torch
from safetensors import safe_open
from torch.nn.functional import linear

from rlgraph.engines.hf.model_files import VISION, in_text_model
from rlgraph.engines.hf.pretrained import check_model, other_tensors, parameter_shapes
from rlgraph.engines.precision import bitsandbytes
from rlgraph.errors import DataError
from rlgraph.values.lora import ALL_LINEAR, CONFIG, TENSORS, LoRA

# Frozen matrices in NF4, 4 bits a number with a float32 scale for each block of 64, by bitsandbytes.

BLOCK = 64


class FourBits:
    """A matrix `[out, in]` in NF4: it multiplies as a matrix of `dtype` that is made for each product, and again for its gradient.

    The numbers are made of float32, so that any copy of the same matrix gives the same.
    """

    def __init__(self, matrix: torch.Tensor, dtype: torch.dtype) -> None:
        self._library = bitsandbytes()
        self.codes, self.state = _quantise_matrix(self._library, matrix)
        self.state.dtype = dtype

    def linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute `states Wᵀ + bias`, with a gradient of `states`."""
        found: torch.Tensor = self._library.matmul_4bit(states, self.codes, quant_state=self.state, bias=bias)
        return found


def round_matrix(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that `FourBits` multiplies with in `dtype`."""
    library = bitsandbytes()
    codes, state = _quantise_matrix(library, matrix)
    found: torch.Tensor = library.functional.dequantize_4bit(codes, state)
    return found.to(dtype)


def _quantise_matrix(library: Any, matrix: torch.Tensor) -> tuple[torch.Tensor, Any]:
    codes, state = library.functional.quantize_4bit(matrix.detach().float().contiguous(), blocksize=BLOCK, quant_type="nf4")
    return codes, state


# Merge an adapter into its base: the one definition of the arithmetic, and a model's weights with an adapter merged in.
#
# A merged matrix is always made of the base that is kept, never of an earlier merge: the thousandth version has no more error than the
# first.

A, B = ".lora_A.weight", ".lora_B.weight"  # end the names of an adapter's matrices, behind the name of their projection


def merge_adapter(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Compute `base + scale · b a` in float32 and round it once, to `dtype`. `a` is [rank, in], `b` is [out, rank], both float32.

    >>> merge_adapter(torch.ones(2, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0]]), 0.5, torch.float32)
    tensor([[1.5000, 2.0000],
            [1.0000, 1.0000]])
    """
    # Into a copy of the base: torch.addmm would copy it once more, with the same bits (0.20 s instead of 0.30 for 8B's widest on a core).
    return base.to(torch.float32, copy=True).addmm_(b, a, alpha=scale).to(dtype)


class BaseWeights(Mapping[str, torch.Tensor]):
    """The tensors of a model's folder, mapped from their files: the base that is kept. Those that merge lie on the adapter's device.

    Those that merge are rounded as `base`, "nf4", says. Raises DataError for a folder without a model.
    """

    def __init__(self, folder: str | Path, base: str | None = None) -> None:
        shapes = parameter_shapes(folder)
        self._folder, self._rounds = folder, base is not None
        self._tensors: dict[str, torch.Tensor] = {}
        self._others: dict[str, torch.Tensor] = {}  # of a tower
        others = other_tensors(folder) if check_model(folder).nested else {}
        for file in sorted(check_model(folder).path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                self._tensors |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in shapes}  # noqa: SIM118
                self._others |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in others}  # noqa: SIM118
        self._on_device: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def on(self, device: torch.device, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that merges, on a device, where it is kept from now on: as it is in the folder, or rounded, in `dtype`."""
        if name not in self._on_device or self._on_device[name].device != device:
            tensor = self._tensors[name].to(device)
            self._on_device[name] = round_matrix(tensor, dtype) if self._rounds else tensor
        return self._on_device[name]

    @cached_property
    def _tower(self) -> Mapping[str, Sequence[Any]]:
        """The tensors of the folder that the parameters of its tower are; see `FolderWeights.parts`."""
        from rlgraph.engines.hf.folder_weights import FolderWeights
        from rlgraph.engines.hf.unloaded import load_vision

        return FolderWeights(self._folder, load_vision(self._folder), whole=True).parts()

    def with_adapter(self, adapter: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype) -> "MergedWeights":
        """The weights with an adapter merged in, `adapter` by the names `….lora_A.weight` and `….lora_B.weight` of its matrices.

        Of a language model in a multimodal folder they are named as in a text model, or as in the whole. With matrices beside those of a
        tower, the tower belongs to the weights. Raises DataError for an adapter of another model.
        """
        named = {in_text_model(name).removesuffix(".weight"): name.removesuffix(".weight") for name in self._tensors}
        parts = [(in_text_model(name.removeprefix(VISION)).partition(".lora_"), name) for name in adapter]
        if self._others and any(module not in named for (module, _, _), _ in parts):
            named |= {name.removesuffix(".weight"): part.name.removesuffix(".weight") for name, (part, *_) in self._tower.items()}
        adapter = {named.get(module, module) + begin + kind: adapter[name] for (module, begin, kind), name in parts}
        changed = tuple(name.removesuffix(A) + ".weight" for name in adapter if name.endswith(A))
        if not self._tensors.keys() >= set(changed):
            self._tensors |= self._others
        for name in changed:
            module = name.removesuffix(".weight")
            there = tuple(self._tensors[name].shape) if name in self._tensors else None
            b = adapter.get(module + B)
            if b is None or there != (b.shape[0], adapter[module + A].shape[1]):
                given = "no lora_B" if b is None else f"an adapter for {[b.shape[0], adapter[module + A].shape[1]]}"
                has = f"is {list(there)}" if there is not None else "has no such tensor"
                raise DataError(f"adapter: '{module}' has {given}, and the model '{self._folder}' {has}: they belong to different models")
        return MergedWeights(self, adapter, changed, scale, dtype)


class MergedWeights(Mapping[str, torch.Tensor]):
    """A model's weights by their Hugging Face names, in `dtype`. A merged matrix is made when it is asked for, and not kept.

    `changed` names the matrices with an adapter; the others are those of the `base`.
    """

    def __init__(
        self, base: BaseWeights, adapter: Mapping[str, torch.Tensor], changed: tuple[str, ...], scale: float, dtype: torch.dtype
    ) -> None:
        self.base, self.changed = base, changed
        self._adapter, self._scale, self._dtype = adapter, scale, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        a = self._adapter.get(module + A)
        if a is None:
            return self.base[name].to(self._dtype)
        return merge_adapter(self.base.on(a.device, name, self._dtype), a, self._adapter[module + B], self._scale, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def describe_weights(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors with the names and shapes of the weights, without merging any."""
    return weights.base if isinstance(weights, MergedWeights) else weights


# The projections of a model with adapters beside them, and how they begin.

PEFT = "base_model.model."  # begins the names in PEFT's folders


class LoraLinear(torch.nn.Linear):
    """A projection of a model, frozen, with an adapter beside it under PEFT's names; `on` says whether the adapter takes part."""

    def __init__(self, base: torch.nn.Linear, lora: LoRA) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        kind: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.lora_A = torch.nn.Linear(base.in_features, lora.rank, **kind)
        self.lora_B = torch.nn.Linear(lora.rank, base.out_features, **kind)
        self.scale, self.on = lora.scale, True
        self._in_four_bits = lora.base is not None
        self._four_bits: FourBits | None = None

    def finish_loading(self) -> bool:
        """Keep the matrix, which is in memory now, in 4 bits if the settings say so; return whether this call did it."""
        if not self._in_four_bits or self._four_bits is not None:
            return False
        self._four_bits = FourBits(self.weight, self.weight.dtype)
        del self.weight
        return True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = super().forward(states) if self._four_bits is None else self._four_bits.linear(states, self.bias)
        return found + linear(linear(states, self.lora_A.weight), self.lora_B.weight) * self.scale if self.on else found


def attach(
    model: torch.nn.Module,
    adapted: Sequence[torch.nn.Module],
    lora: LoRA,
    dtype: torch.dtype,
    trained_whole: Sequence[torch.nn.Module] = (),
) -> list[LoraLinear]:
    """Freeze a model in `dtype`, on the meta device or in memory, and put adapters beside the targets in its `adapted` parts; return these.

    Modules that are `trained_whole` are left as they are. Raises DataError for targets that no projection of the parts has.
    """
    kept: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied parameters stay one
    for module in (module for module in model.modules() if module not in trained_whole):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in kept:
                kept[parameter] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            module.register_parameter(name, kept[parameter])
    made = []
    there = {name.rpartition(".")[2] for part in adapted for name, module in part.named_modules() if isinstance(module, torch.nn.Linear)}
    for part in adapted:
        for name, projection in [(name, module) for name, module in part.named_modules() if type(module) is torch.nn.Linear]:
            if is_target(name, lora):
                parent, _, own = name.rpartition(".")
                made.append(LoraLinear(projection, lora))
                setattr(part.get_submodule(parent), own, made[-1])
    lacking = [] if lora.targets == ALL_LINEAR else [target for target in lora.targets if target not in there]
    if lacking or not made:
        raise DataError(f"LoRA(targets={list(lora.targets)}): the layers have no projection {lacking[:3]}; they have {sorted(there)}")
    return made


def is_target(name: str, lora: LoRA) -> bool:
    """Whether the projection of this name gets an adapter."""
    return lora.targets == ALL_LINEAR or name.rpartition(".")[2] in lora.targets


class InitialWeights:
    """The matrices that an adapter begins with, by name, for a model of the folder `model`.

    Each is drawn by a generator of its own, so any number of ranks begin with the same bits. Raises DataError for a folder's adapter
    whose targets are others.
    """

    def __init__(self, lora: LoRA) -> None:
        self._lora = lora
        self._file = None if lora.folder is None else Path(lora.folder) / TENSORS

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Give the whole matrix of this name, float32."""
        if self._file is not None:
            return self._read(name, shape)
        if name.endswith(B):
            return torch.zeros(shape)
        draw = torch.Generator().manual_seed(_seed(self._lora.seed, name))
        bound = 1 / math.sqrt(shape[1])  # kaiming_uniform with a = √5, as PEFT and torch's linear layers begin
        return torch.empty(shape).uniform_(-bound, bound, generator=draw)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert self._file is not None
        with safe_open(self._file, "pt") as tensors:
            there = tensors.keys()
            names = (name.removeprefix(VISION), f"model.{name}")  # the second of a critic
            own = next((known for known in there if in_text_model(known.removeprefix(PEFT)) in names), None)
            if own is None:
                raise DataError(f"'{self._file}' has no '{PEFT + name}'; it is an adapter of another model, or of other targets")
            found: torch.Tensor = tensors.get_tensor(own).float()
        if tuple(found.shape) != shape:
            raise DataError(f"'{self._file}': '{own}' has the shape {list(found.shape)}, the model's is {list(shape)}")
        return found


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a matrix of an adapter."""
    return name.endswith((A, B))


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") % (1 << 63)


ALIGNMENT = 64
Wanted: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by the name in the model's folder
Fill: TypeAlias = Callable[[str, torch.Tensor], None]  # copies the weight of a name into a tensor


class SharedBase(Protocol):
    """Frozen weights that several models hold together."""

    def take(self, wanted: Wanted, fill: Fill) -> dict[str, torch.Tensor]:
        """Give the weights of these names; `fill` is called for those that no other model has loaded."""


class ThreadBase:
    """The base of the models of this process: the same tensors for all."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, wanted: Wanted, fill: Fill) -> dict[str, torch.Tensor]:
        """Give the weights of these names; see `SharedBase`."""
        for name, (shape, dtype) in wanted.items():
            if name not in self._held:
                tensor = torch.empty(shape, dtype=dtype)
                fill(name, tensor)
                self._held[name] = tensor
        return {name: self._held[name] for name in wanted}


class _Segment(msgspec.Struct, frozen=True):
    """Where the segment is: handle and inode in the process that made it, and the byte at which each weight begins."""

    process: int
    handle: int
    inode: int
    size: int
    begins: dict[str, int]


class HostBase:
    """The base of the models of a host, which have a process each; they meet at `path`, in a folder that only they can enter."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._handle: int | None = None  # of a segment that this process made; open as long as it lives, for others to find

    def take(self, wanted: Wanted, fill: Fill) -> dict[str, torch.Tensor]:
        """Give the weights of these names; see `SharedBase`. Processes take turns: a later one waits until an earlier one has loaded."""
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._segment() as (handle, note):
                begins, size = dict(note.begins), note.size
                lacking = [name for name in wanted if name not in begins]
                for name in lacking:
                    begins[name] = -(-size // ALIGNMENT) * ALIGNMENT
                    size = begins[name] + _bytes(*wanted[name])
                if lacking:
                    os.ftruncate(handle, size)
                    whole = mmap.mmap(handle, size)
                    for name in lacking:
                        fill(name, _view(whole, begins[name], *wanted[name]))
                    self._tell(msgspec.structs.replace(note, size=size, begins=begins))
                # Pages of a private mapping are shared until they are written to: nobody changes the base of another.
                whole = mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE)
                return {name: _view(whole, begins[name], *wanted[name]) for name in wanted}

    @contextlib.contextmanager
    def _segment(self) -> Iterator[tuple[int, _Segment]]:
        """Open the segment that another process has made, or else make one."""
        found = self._open_segment()
        if found is not None:
            try:
                yield found
            finally:
                os.close(found[0])
            return
        self._handle = os.memfd_create("rlgraph base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield self._handle, _Segment(os.getpid(), self._handle, os.fstat(self._handle).st_ino, 0, {})

    def _open_segment(self) -> tuple[int, _Segment] | None:
        try:
            note = msgspec.json.decode(self._path.read_bytes(), type=_Segment)
            handle = os.open(f"/proc/{note.process}/fd/{note.handle}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # nobody has loaded it, or who did is gone
            return None
        if os.fstat(handle).st_ino == note.inode and os.fstat(handle).st_size >= note.size:
            return handle, note
        os.close(handle)  # of another process, that has got the number of one that is gone
        return None

    def _tell(self, note: _Segment) -> None:
        beside = Path(f"{self._path}.new")
        beside.write_bytes(msgspec.json.encode(note))
        beside.rename(self._path)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _view(memory: mmap.mmap, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=begin).view(shape)


# An adapter on disk as PEFT writes it: its names, its config, and its matrices read back.

Numbers = tuple[int, ...]


class SavedAdapter(msgspec.Struct, frozen=True):
    """The settings of an adapter, as checkpoints name it."""

    rank: int
    alpha: float
    targets: Literal["all-linear"] | tuple[str, ...]
    base: str | None = None  # how its model was rounded

    @classmethod
    def of(cls, lora: LoRA) -> "SavedAdapter":
        """The settings of a trained adapter."""
        return cls(lora.rank, lora.alpha, lora.targets, lora.base)

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank


def peft_names(shapes: Mapping[str, Numbers], part: str = "model.") -> dict[str, tuple[str, Numbers]]:
    """Name the matrices of an adapter as PEFT does: (trainer's name, shape) by each name. `part` begins those of a language model.

    >>> peft_names({"model.layers.0.self_attn.q_proj.lora_A.weight": (8, 64)})
    {'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight': ('model.layers.0.self_attn.q_proj.lora_A.weight', (8, 64))}
    """
    named = {part + name.removeprefix("model.") if name.startswith("model.") else name.removeprefix(VISION): name for name in shapes}
    return {PEFT + own: (name, shapes[name]) for own, name in named.items()}


def write_config(folder: Path, adapter: SavedAdapter, base: str, names: Mapping[str, Numbers]) -> None:
    """Write adapter_config.json; `base` is the hub id or the folder of the model, `names` are those of the trainer's matrices."""
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "revision": None,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Read the matrices of an adapter's folder, float32, by the trainer's names."""
    with safe_open(folder / TENSORS, "pt") as tensors:
        return {name.removeprefix(PEFT): tensors.get_tensor(name).float() for name in tensors.keys()}  # noqa: SIM118

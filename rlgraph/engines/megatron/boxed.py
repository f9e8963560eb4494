"""A tensor of which a rank holds some boxes: what Megatron-Core keeps in one parameter may be boxes of several, such as q, k and v.

torch.distributed.checkpoint writes and reads it box by box, so that a checkpoint is the same whichever trainer wrote it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], torch.Tensor]  # its offsets in the whole tensor, and its part of it


class BoxedTensor(torch.Tensor):
    """A tensor of `shape`, of which this rank holds `boxes`. It can be copied to another of the same boxes, and to the host.

    >>> rows = BoxedTensor((4, 2), [((2, 0), torch.ones(2, 2))])
    >>> rows.shape, torch.empty_like(rows, device="cpu").copy_(rows).boxes[0][1].sum()
    (torch.Size([4, 2]), tensor(4.))
    """

    boxes: list[Box]

    @staticmethod
    def __new__(cls, shape: Sequence[int], boxes: Sequence[Box]) -> "BoxedTensor":
        first = boxes[0][1]
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=first.dtype, device=first.device)
        made.boxes = list(boxes)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BoxedTensor({list(self.shape)}, boxes at {[list(offsets) for offsets, _ in self.boxes]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return _each(args[0], torch.Tensor.detach)
        if func is torch.ops.aten.empty_like.default:
            return _each(args[0], lambda box: torch.empty(box.shape, dtype=box.dtype, device=(kwargs or {}).get("device", box.device)))
        if func is torch.ops.aten.copy_.default:
            for (_, to), (_, of) in zip(args[0].boxes, args[1].boxes, strict=True):
                to.copy_(of)
            return args[0]
        raise NotImplementedError(f"{func} of a BoxedTensor")

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(box for offsets, box in self.boxes if index.offset is None or torch.Size(offsets) == index.offset)


def _each(tensor: BoxedTensor, work: Callable[[torch.Tensor], torch.Tensor]) -> BoxedTensor:
    return BoxedTensor(tensor.shape, [(offsets, work(box)) for offsets, box in tensor.boxes])

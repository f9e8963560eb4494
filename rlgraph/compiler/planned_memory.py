"""The memory of a place in a plan: its parts at the peak, and at each instant of an update."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedMemory:
    """Estimated bytes on a GPU of a pool or on the host (None), while a job runs or loads: parts, peak, what must fit, what there is.

        >>> need = PlannedMemory("train", (("weights", 2**30), ("logits", 2**29)), 3 * 2**29, 3 * 2**29, None, False,
        ...                      (("head", (("logits", 2**29),)), ("backward of a layer", (("activations", 2**28),))))
        >>> print(need)
        a GPU of 'train': 1.50 GiB at the peak
          peak                          1.50 GiB: weights 1.00, logits 0.50
          head                          0.50 GiB: logits 0.50
          backward of a layer           0.25 GiB: activations 0.25

    `parts` are those of the peak. `instants` has the parts that come and go at each instant of an update, of which the peak is the largest;
    `print(need)` shows both.
    """

    pool: str | None
    parts: tuple[tuple[str, int], ...]
    peak_bytes: int
    least_bytes: int
    limit: int | None
    loading: bool = False
    instants: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.peak_bytes / 2**30:.2f} GiB at the peak", _sizes("peak", self.parts)]
        return "\n".join([*lines, *(_sizes(instant, parts) for instant, parts in self.instants)])

    @property
    def place(self) -> str:
        """The place and the time in words."""
        return ("host" if self.pool is None else f"a GPU of '{self.pool}'") + (" while models load" if self.loading else "")


def _sizes(instant: str, parts: tuple[tuple[str, int], ...]) -> str:
    total = sum(size for _, size in parts)
    return f"  {instant:26} {total / 2**30:7.2f} GiB: " + ", ".join(f"{what} {size / 2**30:.2f}" for what, size in parts)

"""A transport of a user's own: each message is a file in a folder, which a rename makes appear at once. All else is the library's."""

import io
import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from rlgraph.channels.api import End, Meter, Site, Statistics, Stop, Taken, Transport, check_channel, check_columns
from rlgraph.columns import Column, Columns
from rlgraph.errors import ChannelError, ChannelTimeout

FILES = Transport("files", "support.files_channel", "host", writer_keeps="host", reader_keeps="host")
POLL_S = 0.0005


def open_writer(transport: Transport, site: Site) -> "FilesWriter":
    return FilesWriter(site)


def open_reader(transport: Transport, site: Site) -> "FilesReader":
    return FilesReader(site)


class Folder:
    """One end's view of the folder, where readers are numbered in the order in which they come."""

    def __init__(self, site: Site, role: str) -> None:
        self.path, self.name = Path(site.address), ""  # the end's own, before the files that it writes
        self.end, self.meter = End(site.channel, role), Meter(site.slots)
        self.stop: Stop | None = None

    def write(self, name: str, content: bytes) -> None:
        """Let a file appear with all that is in it."""
        begun = self.path / f"{self.name}.begun"
        begun.write_bytes(content)
        os.replace(begun, self.path / name)

    def read(self, name: str) -> str | None:
        """What is in a file, None where it is not there."""
        path = self.path / name
        return path.read_text() if path.exists() else None

    def wait(self, ready: Callable[[], bool], late: Callable[[], ChannelTimeout], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self.meter.count_wait():
            while not ready():
                if time.monotonic() > deadline:
                    raise late()
                time.sleep(POLL_S)

    def end_with(self, reason: str = "") -> None:
        """Stop for a reason, the first that is given; none is a close."""
        if self.stop is None:
            self.stop = Stop(self.end.role, reason or None)
            self.write(f"{self.name}.stop", reason.encode())

    def stop_of(self, name: str, role: str) -> Stop | None:
        """How another end has stopped, if it has."""
        reason = self.read(f"{name}.stop")
        return None if reason is None else Stop(role, reason or None)

    def statistics(self) -> Statistics:
        return self.meter.statistics()


class FilesWriter:
    def __init__(self, site: Site) -> None:
        check_channel(site.channel, site.slots, site.readers)
        self.address = site.address
        self._folder, self._slots, self._next = Folder(site, "the writer"), site.slots, 0
        self._folder.name = "writer"
        self._readers = [f"reader{number}" for number in range(site.readers)]
        self._folder.path.mkdir(parents=True)

    def put(
        self, step: int, columns: Columns, timeout_s: float, *, dtype: torch.dtype | None = None, bucket_bytes: int | None = None
    ) -> None:
        folder, end = self._folder, self._folder.end
        check_columns(end, step, columns)

        def room() -> bool:
            for stop in (folder.stop, *(folder.stop_of(reader, "a reader") for reader in self._readers)):
                if stop is not None:
                    raise end.stop_error(step, stop)
            return self._used() < self._slots

        folder.wait(room, lambda: end.timeout(step, timeout_s, f"all {self._slots} slots are taken"), timeout_s)
        stored = {name: _stored(column, dtype) for name, column in columns.items()}
        content = io.BytesIO()
        torch.save({"step": step, "columns": stored}, content)
        folder.write(f"{self._next}", content.getvalue())
        self._next += 1
        folder.meter.message(_size(stored), self._used())

    def _used(self) -> int:
        """How many messages not every reader has released; those that all have are deleted."""
        released = min(int(self._folder.read(f"{reader}.released") or 0) for reader in self._readers)
        for message in itertools.takewhile(Path.exists, (self._folder.path / f"{n}" for n in range(released - 1, -1, -1))):
            message.unlink()
        return self._next - released

    def close(self) -> None:
        self._folder.end_with()

    def fail(self, reason: str) -> None:
        self._folder.end_with(f"failed: {reason}")

    def statistics(self) -> Statistics:
        self._folder.meter.use(self._used())
        return self._folder.statistics()


class FilesReader:
    def __init__(self, site: Site) -> None:
        self._folder, self._next = Folder(site, "a reader"), 0
        self._taken: deque[Taken] = deque()
        folder = self._folder
        where = f"channel '{site.channel}': no writer at {site.address} within {site.timeout_s:g} s"
        folder.wait(folder.path.exists, lambda: ChannelTimeout(where), site.timeout_s)
        for number in range(site.readers):
            try:
                (folder.path / f"reader{number}").mkdir()  # which one end alone can make
            except FileExistsError:
                continue
            folder.name = f"reader{number}"
            return
        raise ChannelError(f"channel '{site.channel}' has {site.readers} readers, and all of them have been made")

    def take(self, step: int, timeout_s: float) -> dict[str, Column]:
        folder, end = self._folder, self._folder.end

        def there() -> bool:
            stop, found = folder.stop_of("writer", "the writer"), (folder.path / f"{self._next}").exists()
            if folder.stop is not None:
                raise end.stop_error(step, folder.stop)
            if stop is not None and (stop.reason is not None or not found):
                raise end.stop_error(step, stop)
            return found

        folder.wait(there, lambda: end.timeout(step, timeout_s, "no message is there"), timeout_s)
        message = torch.load(folder.path / f"{self._next}", weights_only=True)
        if message["step"] != step:
            raise end.defect(step, f"the next message is that of step {message['step']}; both ends must count the same steps")
        self._next += 1
        self._taken.append(Taken(step, message["columns"]))
        folder.meter.message(_size(message["columns"]), len(self._taken))
        return dict(message["columns"])

    def begin(self, step: int, timeout_s: float) -> dict[str, Column]:
        return self.take(step, timeout_s)

    def wait_for_tensors(self, beyond: int, timeout_s: float) -> int:
        return self._taken[-1].tensors

    def release(self) -> None:
        end = self._folder.end
        if not self._taken:
            raise ChannelError(f"channel '{end.channel}', a reader: release() without a message taken; each take is released once")
        taken = self._taken.popleft()
        self._folder.write(f"{self._folder.name}.released", str(self._next - len(self._taken)).encode())
        self._folder.meter.use(len(self._taken))
        taken.check_unchanged(end)

    def close(self) -> None:
        self._folder.end_with()

    def fail(self, reason: str) -> None:
        self._folder.end_with(f"failed: {reason}")

    def statistics(self) -> Statistics:
        return self._folder.statistics()


def _stored(column: Column, dtype: torch.dtype | None) -> Column:
    if isinstance(column, torch.Tensor):
        column = column.detach().to("cpu", dtype if column.is_floating_point() else None, copy=True)
        return column.contiguous()
    return list(column)


def _size(columns: Columns) -> int:
    return sum(c.nbytes if isinstance(c, torch.Tensor) else sum(len(row.encode()) for row in c) for c in columns.values())

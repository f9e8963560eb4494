"""Objects in processes of their own, that are asked over pipes: engines and trainers that each have a CUDA context."""

import multiprocessing
import time
import traceback
from contextlib import suppress
from typing import Any

BEGAN = time.time()


def say(*words: object) -> None:
    print(f"[{time.time() - BEGAN:4.0f} s]", *words, flush=True)


def serve(made: type, conn: Any, settings: dict[str, Any]) -> None:
    """Answer what is asked over a pipe by the methods of an object."""
    served = None
    while True:
        try:
            method, given = ("start", {}) if served is None else conn.recv()
            if served is None:
                served, answer = made(**settings), None
            else:
                answer = getattr(served, method)(**given)
            conn.send((True, answer))
        except EOFError:
            return
        except Exception:  # noqa: BLE001 (the process that asked is told)
            conn.send((False, traceback.format_exc()))
            if served is None:
                return


class Served:
    """An object in a process of its own."""

    def __init__(self, made: type, deadline: float, **settings: Any) -> None:
        self.deadline = deadline
        self.conn, other = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(made, other, settings))
        self.process.start()
        other.close()

    def ask(self, method: str, **given: Any) -> Any:
        self.conn.send((method, given))
        return self.answer()

    def answer(self) -> Any:
        while not self.conn.poll(0.2):
            if time.time() - BEGAN > self.deadline:
                raise TimeoutError("no time left")
        good, value = self.conn.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def leave(self) -> None:
        with suppress(OSError):
            self.conn.close()
        self.process.join(8)
        if self.process.is_alive():
            self.process.kill()

"""A real browser for tests of pages: Chromium, with what a script of the test found there."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--disable-dev-shm-usage")


def open_page(address: str, folder: Path, *more: str, width: int = 1280) -> tuple[str, str]:
    """Open an address; give the page as it is then, and the lines of the browser's console."""
    assert CHROMIUM is not None
    flags = [*FLAGS, f"--window-size={width},1400", f"--user-data-dir={folder / 'profile'}", *more, "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, address], capture_output=True, text=True, timeout=250, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def run_script(script: str, text: str, folder: Path) -> tuple[Any, str]:
    """Open a page with a script of the test at its end, which sets `document.title` to JSON; give that, and the console."""
    file = folder / "page.html"
    file.write_text(text.replace("</body>", f"<script>\n{script}\n</script></body>"), encoding="utf-8")
    page, console = open_page(file.as_uri(), folder)
    title = re.search(r"<title>(.*?)</title>", page, re.S)
    assert title is not None
    return json.loads(unescape(title[1])), console


class Browser:
    """A browser that a test drives while the page lives, by the DevTools protocol over two pipes. A context manager."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        flags = [*FLAGS, "--remote-debugging-pipe", "--window-size=1280,1400", f"--user-data-dir={folder / 'profile'}"]
        command = f'exec "$@" 3<&{reads} 4>&{writes} 2>/dev/null'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "browser", CHROMIUM, *flags], pass_fds=(reads, writes), start_new_session=True
        )
        os.close(reads)
        os.close(writes)
        self._number, self._rest, self._session = 0, b"", ""
        self.complaints: list[str] = []  # exceptions and errors of the page's console

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._read, 1 << 16)
            line, _, self._rest = self._rest.partition(b"\0")
            told = json.loads(line)
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            if told.get("method") == "Runtime.exceptionThrown" or told.get("params", {}).get("type") == "error":
                self.complaints.append(json.dumps(told["params"])[:500])

    def open(self, address: str) -> None:
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Page.enable")
        self._ask("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        told = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = self.value(expression)
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{expression} did not become true; the page has {self.value('document.body.innerText')[:500]}")

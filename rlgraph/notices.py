"""What works otherwise than asked, or slower than it could: said once, in the job's output and in its report.

A worker keeps what it says for its next report, and the driver prints it. In a process that reports to nobody it is logged.
"""

import logging

log = logging.getLogger("rlgraph.notices")


class Notices:
    """What this process has said, each text once. `carried`: somebody fetches it with `taken`."""

    def __init__(self) -> None:
        self.carried = False
        self._said: dict[str, bool] = {}  # whether it was taken

    def say(self, text: str) -> None:
        """Say a sentence, unless it was said before."""
        if text in self._said:
            return
        self._said[text] = not self.carried
        if not self.carried:
            log.warning("%s", text)

    def taken(self) -> list[str]:
        """Take what was said since the last time."""
        found = [text for text, gone in self._said.items() if not gone]
        self._said |= dict.fromkeys(found, True)
        return found


here = Notices()

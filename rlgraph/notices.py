"""Notices of fallbacks: what works differently than asked, or slower than it could. Each is said once, in the job's output and report.

A worker keeps its notices for its next report, and the driver prints them. A process that does not report logs them.
"""

import logging

log = logging.getLogger("rlgraph.notices")


class Notices:
    """The notices of this process, each text once. `carried` says that a report fetches them with `taken`.

    >>> notices = Notices()
    >>> notices.carried = True
    >>> notices.say("no NVLink: tensors go through the host"), notices.taken(), notices.taken()
    (None, ['no NVLink: tensors go through the host'], [])
    """

    def __init__(self) -> None:
        self.carried = False
        self._said: dict[str, bool] = {}  # the text, and whether it was taken

    def say(self, text: str) -> None:
        """Say a sentence, unless this process has said it before."""
        if text in self._said:
            return
        self._said[text] = not self.carried
        if not self.carried:
            log.warning("%s", text)

    def said(self) -> tuple[str, ...]:
        """List all that was said."""
        return tuple(self._said)

    def forget(self) -> None:
        """Begin as a new process does: nothing has been said."""
        self._said.clear()

    def taken(self) -> list[str]:
        """Take the notices since the last call."""
        found = [text for text, gone in self._said.items() if not gone]
        self._said |= dict.fromkeys(found, True)
        return found


here = Notices()

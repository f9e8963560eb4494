"""Environments of plain values, for another process: what `rg.environments.process` runs in the tests."""

import os
import time


class Count:
    """Counts turns to its `goal`; its methods are not async."""

    def __init__(self, goal, word):
        self.goal, self.word, self.turns = goal, word, 0

    def reset(self):
        print("a game begins")  # goes to standard error, and is no answer
        return [{"role": "user", "content": f"{self.word} {self.goal} in process {os.getpid()}"}]

    def step(self, said):
        self.turns += 1
        if said["content"] == "raise":
            raise KeyError("no such move")
        if said["content"] == "die":
            os._exit(3)
        if said["content"] == "wait":
            time.sleep(0.2)
        done = self.turns == self.goal
        return {"messages": [{"role": "user", "content": "more"}], "reward": float(done), "done": done, "info": {"turns": 1}}

    def close(self):
        pass

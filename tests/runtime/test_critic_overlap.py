"""A rollout decodes while the critic still trains on the batch before: the plan says so, and the workers do so."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import fakes
from support.forked_workers import job as forked

import rlgraph as rg

STEPS = 5
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Begun:
    """Notes in a folder which rollouts have begun."""

    folder: Path

    def __call__(self, step: int) -> None:
        (self.folder / str(step)).touch()


@dataclass(frozen=True)
class Meanwhile:
    """Holds a critic's update until the next rollout has begun. Raises where it does not begin."""

    folder: Path

    def __call__(self, step: int) -> None:
        ends = time.monotonic() + PATIENCE_S
        while step + 1 < STEPS and not (self.folder / str(step + 1)).exists():
            assert time.monotonic() < ends, f"rollout {step + 1} waits for the critic's update of batch {step}"
            time.sleep(0.002)


@pytest.mark.parametrize("apart", [False, True])
def test_the_next_rollout_begins_before_the_critic_is_done_with_the_last_batch(tmp_path: Path, apart: bool) -> None:
    critic = fakes.TrainCritic(0.0, Meanwhile(tmp_path))
    own = rg.Pool("values") if apart else None
    with forked(fakes.vector_loop(0, begun=Begun(tmp_path), critic=critic, critic_pool=own)) as running:
        assert len(list(running.steps(STEPS))) == STEPS

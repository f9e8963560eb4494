"""A generator's end of a feedback edge: a version is received once all ranks have published it."""

from pathlib import Path

import pytest
import torch

import rlgraph as rg
from rlgraph.channels.host.channel import HostReader, HostWriter
from rlgraph.channels.local import local_channel
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.channels.weights.shards import WeightShard, unsharded_weights
from rlgraph.errors import ChannelTimeout
from rlgraph.plan.channels import staged_versions


def test_a_version_that_one_rank_has_not_published_yet_is_not_lost_by_looking_for_it() -> None:
    ends = [local_channel(f"weights[{rank}]", slots=2, readers=1) for rank in range(2)]
    writers = [WeightsWriter(writer, torch.float32) for writer, _ in ends]
    reader = WeightsReader([readers[0] for _, readers in ends], buffers=1)
    for version in (1, 2):
        writers[0].publish(version, [WeightShard("w", (3, 3), (0, 0), torch.full((1, 3), float(version)))], 1.0)
        for _ in range(2):
            with pytest.raises(ChannelTimeout):
                reader.receive(version, 0.0)
        writers[1].publish(version, [WeightShard("w", (3, 3), (1, 0), torch.full((2, 3), 10.0 * version))], 1.0)
        found = reader.receive(version, 0.0)["w"]
        assert found.tolist() == [[version] * 3] + [[10 * version] * 3] * 2
        reader.release()


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize(("depth", "buffers"), [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_the_last_versions_of_a_run_need_no_further_step(tmp_path: Path, depth: int, buffers: int, on_gpus: bool) -> None:
    slots = staged_versions(rg.feedback("weights", depth=depth, buffers=buffers), on_gpus=on_gpus)
    end = HostWriter("weights", slots, 1, b"key", f"{tmp_path}/w")
    reader = WeightsReader([HostReader("weights", b"key", f"{tmp_path}/w", 5.0)], buffers)
    writer = WeightsWriter(end, torch.float32)
    for step in range(6):
        if step > depth:
            reader.receive(step - depth, 5.0)
            reader.release()
        writer.publish(step + 1, unsharded_weights({"w": torch.ones(2)}), 5.0)
    end.close()
    reader.readers[0].close()

"""A generator's end of a feedback edge: a version is received once all ranks have published it."""

import pytest
import torch

from rlgraph.channels.local import local_channel
from rlgraph.channels.weights import WeightsReader, WeightsWriter
from rlgraph.errors import ChannelTimeout


def test_a_version_that_one_rank_has_not_published_yet_is_not_lost_by_looking_for_it() -> None:
    ends = [local_channel(f"weights[{rank}]", slots=2, readers=1) for rank in range(2)]
    writers = [WeightsWriter(writer, torch.float32) for writer, _ in ends]
    reader = WeightsReader([readers[0] for _, readers in ends], buffers=1)
    for version in (1, 2):
        writers[0].publish(version, {"w": torch.full((1, 3), float(version))}, 1.0)
        for _ in range(2):
            with pytest.raises(ChannelTimeout):
                reader.receive(version, 0.0)
        writers[1].publish(version, {"w": torch.full((2, 3), 10.0 * version)}, 1.0)
        found = reader.receive(version, 0.0)["w"]
        assert found.tolist() == [[version] * 3] + [[10 * version] * 3] * 2
        reader.done()

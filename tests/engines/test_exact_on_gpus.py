"""What of the exact kernels of a GPU needs none: what is refused, the table of rotations, and rows that are computed in company."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlgraph.engines.exact import gpu_products
from rlgraph.engines.exact.rules import check_model, table_of
from rlgraph.errors import DataError

pytestmark = pytest.mark.stage("plugins")

PLAIN: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "max_position_embeddings": 300,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"model_type": "qwen2"}, "the family 'qwen2' with heads of 128 is not proven to be exact on a GPU; llama and qwen3"),
        ({"head_dim": 96}, "with heads of 96 is not proven .* with heads of 64 or 128"),
        ({"attention_bias": True}, "with heads of 128 and biases is not proven"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "on a GPU exact=True is proven only for plain rotary embeddings"),
    ],
)
def test_what_is_not_proven_on_a_gpu_is_refused(other: dict[str, Any], match: str) -> None:
    check_model(SimpleNamespace(**PLAIN))
    check_model(SimpleNamespace(**PLAIN | {"model_type": "llama", "head_dim": None, "hidden_size": 128}))  # two heads of 64
    with pytest.raises(DataError, match=match):
        check_model(SimpleNamespace(**PLAIN | other))


def test_the_table_has_the_cosines_and_sines_of_all_positions() -> None:
    table = table_of(SimpleNamespace(**PLAIN), torch.float64, "cpu")
    speeds = torch.tensor([10_000.0 ** (-2 * pair / 128) for pair in range(64)], dtype=torch.float64)
    assert table.shape == (300, 128)
    assert torch.allclose(table[299], torch.cat([(299 * speeds).cos(), (299 * speeds).sin()]), atol=1e-12)


def test_maps_whose_lone_row_differs_compute_it_as_two_and_other_differences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "rows_that_differ", lambda out, into: {(3, 5): (1,), (5, 3): ()}[out, into])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 5))
    states = torch.randn(1, 5)
    before = model(states)
    gpu_products.pad_single_rows(model)
    assert [type(module) for module in model] == [gpu_products.RowInCompany, torch.nn.Linear]
    seen: list[int] = []
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, rows: seen.append(len(rows)) or rows @ self.weight.t() + self.bias)
    assert torch.allclose(model(states), before)
    assert seen == [2, 1]
    model[0](torch.randn(3, 5))
    assert seen == [2, 1, 3]
    monkeypatch.setattr(gpu_products, "rows_that_differ", lambda out, into: (1, 7, 9))
    with pytest.raises(DataError, match=r"on a GPU matmuls with a matrix of 3 x 5 depend on the number of rows, e\.g\. with 1, 7, 9 rows"):
        gpu_products.shapes_needing_batch([(3, 5)])

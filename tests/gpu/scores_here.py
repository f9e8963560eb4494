"""Compares the kernels that score tokens with the plain computation in float64: python scores_here.py

Without a GPU: TRITON_INTERPRET=1 python scores_here.py
"""

import torch

from rlgraph.engines.forward.triton_scores import TritonScores

device = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(9, 151936, 1.0), (64, 9001, 0.7), (3, 4096, 1.3), (5, 100, 1.0), (0, 100, 1.0)]  # rows, words, temperature
torch.manual_seed(0)
for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
    for rows, words, temperature in SHAPES if device == "cuda" else SHAPES[2:]:
        logits = (torch.randn(rows, words + 3, device=device) * 3).to(dtype)[:, :words]  # rows that do not follow one another
        tokens = torch.randint(words, (rows,), device=device)
        given = torch.randn(2, rows, device=device)
        own, plain = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
        found = TritonScores.apply(own, tokens, temperature, True)
        table = (plain / temperature).log_softmax(-1)
        expected = table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)
        torch.autograd.backward(found, list(given))
        torch.autograd.backward(expected, list(given.double()))
        for mine, true in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), true, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.grad.double(), plain.grad, atol=bound, rtol=bound)
        alone = [TritonScores.apply(logits[row : row + 1], tokens[row : row + 1], temperature, True)[0] for row in range(rows)]
        assert not rows or torch.equal(torch.cat(alone), found[0]), "a row depends on the rows beside it"
        print(f"{dtype}, {rows} rows of {words} words at {temperature}")
print("equal")

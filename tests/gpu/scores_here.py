"""Compares the kernels that score tokens with the plain computation in float64: python scores_here.py

Without a GPU: TRITON_INTERPRET=1 python scores_here.py
"""

import torch

from rlgraph.engines.forward import collectives
from rlgraph.engines.forward.collectives import VocabularyShard
from rlgraph.engines.forward.triton_scores import TritonScores


def halves(logits, temperature):
    """Yield each half of an even vocabulary, next to what a rank with the other half would send of `tokens`."""
    size = logits.shape[1] // 2
    for mine in (0, 1):
        other = VocabularyShard(None, (1 - mine) * size, size, size)
        scaled = logits[:, other.first : other.first + size].float() / temperature
        table, (own, here) = scaled.log_softmax(-1), other.local_ids(tokens)
        entropies = -(table.exp() * table).sum(-1)
        sent = torch.stack([scaled.amax(-1), -table.amax(-1), table.gather(-1, own[:, None])[:, 0], entropies, here.float()])
        collectives.stack_ranks = lambda own, group, sent=sent: torch.stack([own, sent])
        yield VocabularyShard(None, mine * size, size, size)


device = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(9, 151936, 1.0), (64, 9001, 0.7), (3, 4096, 1.3), (5, 100, 1.0), (0, 100, 1.0)]  # rows, words, temperature
torch.manual_seed(0)
for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
    for rows, words, temperature in SHAPES if device == "cuda" else SHAPES[2:]:
        logits = (torch.randn(rows, words + 3, device=device) * 3 + 100).to(dtype)[:, :words]  # rows that do not follow one another
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
        for half in halves(logits, temperature) if words % 2 == 0 and rows else ():
            part = slice(half.first, half.first + half.size)
            cut = logits[:, part].detach().requires_grad_()
            of_half = TritonScores.apply(cut, tokens, temperature, True, half)
            torch.autograd.backward(of_half, list(given))
            for mine, true in zip(of_half, expected, strict=True):
                torch.testing.assert_close(mine.double(), true, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(cut.grad.double(), plain.grad[:, part], atol=bound, rtol=bound)
        alone = [TritonScores.apply(logits[row : row + 1], tokens[row : row + 1], temperature, True)[0] for row in range(rows)]
        assert not rows or torch.equal(torch.cat(alone), found[0]), "a row depends on the rows beside it"
        print(f"{dtype}, {rows} rows of {words} words at {temperature}")
print("equal")

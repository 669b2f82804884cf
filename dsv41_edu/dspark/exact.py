"""The law of a verifier's output, with no sampling: all drafts and all outcomes of its tests, added up.

    chance of a draft   q_0(y_1) q_1(y_2) ... q_g-1(y_g)
    of tau, given it    the outcomes of its n tests that lead to tau, each a product of a_i or 1 - a_i
    of the next token   max(w_tau p_tau - q_tau, 0), normalised
    after that          the target's own laws, up to g + 1 tokens

The laws of the next token after every prefix of i tokens are a tensor of i + 1 axes: `target[i][x_1, ..., x_i]` is
[V]. The chances are those that the sampling verifiers test against. For small vocabularies: V^g drafts.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dsv41_edu.dspark.verification import Rule, residual


class Law(NamedTuple):
    """tokens: fp64 [V] * (g + 1), the law of the first g + 1 tokens; accepted: fp64 [g + 1], that of tau."""

    tokens: Tensor
    accepted: Tensor

    @property
    def expected(self) -> float:
        """How many drafts are accepted on average."""
        return float(self.accepted @ torch.arange(len(self.accepted), dtype=torch.float64))


def target_law(target: Sequence[Tensor]) -> Tensor:
    """The law of the first tokens, as many as there are laws: fp64 [V] * len(target)."""
    law = torch.ones((), dtype=torch.float64)
    for after in target:
        law = law.unsqueeze(-1) * after
    return law


def output_law(
    rule: Rule,
    target: Sequence[Tensor],
    draft: Sequence[Tensor],
    drawn: Sequence[Tensor] | None = None,
    lengths: Tensor | None = None,
) -> Law:
    """What comes out where drafts are tested by `rule` with p from `target` and q from `draft`.

    target: g + 1 tensors, draft: g, fp64. drawn: the laws that the drafts really come from, where a fault makes them
    others; they must not give a token that draft excludes. lengths: int64 [V] * g, of each block the drafts that are
    verified; g if None. Raises ValueError for shapes.
    """
    g, V = len(draft), target[0].shape[0]
    drawn = draft if drawn is None else drawn
    lengths = torch.full((V,) * g, g) if lengths is None else lengths
    for name, laws, axes in (
        ("target", target, range(1, g + 2)),
        ("draft", draft, range(1, g + 1)),
        ("drawn", drawn, range(1, g + 1)),
        ("lengths", [lengths], [g]),
    ):
        found, expected = [list(law.shape) for law in laws], [[V] * n for n in axes]
        if found != expected:
            raise ValueError(f"{name} has shapes {found}: expected {expected}")
    chance, accepted = target_law(drawn), torch.zeros(g + 1, dtype=torch.float64)
    tokens = torch.zeros((V,) * (g + 1), dtype=torch.float64)
    for n in lengths.unique().tolist():
        drafts = ((lengths == n) & (chance > 0)).nonzero()
        prefix = [torch.zeros(len(drafts), dtype=torch.int64)]  # its number in the order of the ids
        for i in range(n):
            prefix.append(prefix[-1] * V + drafts[:, i])
        p = [target[i].reshape(-1, V)[prefix[i]] for i in range(n + 1)]
        q = [draft[i].reshape(-1, V)[prefix[i]] for i in range(n)] + [torch.zeros_like(p[n])]
        a, w = rule.chances(p, q, drafts[:, :n])
        outcomes = torch.tensor([*product((False, True), repeat=n)], dtype=torch.bool)
        joint = torch.where(outcomes, a.unsqueeze(1), 1 - a.unsqueeze(1)).prod(-1) * chance[*drafts.T].unsqueeze(1)
        tau = torch.zeros(len(drafts), n + 1, dtype=torch.float64).index_add(1, rule.count(outcomes), joint)
        accepted[: n + 1] += tau.sum(0)
        for i in range(n + 1):
            left = residual(p[i], q[i], w[:, i])
            left *= (tau[:, i] / left.sum(1)).unsqueeze(1)
            law = torch.zeros(V**i, V, dtype=torch.float64).index_add(0, prefix[i], left).view((V,) * (i + 1))
            for after in target[i + 1 :]:
                law = law.unsqueeze(-1) * after
            tokens += law
    return Law(tokens, accepted)

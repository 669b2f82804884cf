"""The report's own way to step, as an option: no element-wise second moments but for vectors.

    matrices     u = orthogonalise(m) sqrt(max(rows, columns)) / 5        Muon, each head's block by itself
    embeddings, head, tables     u = balance(m)                           rows and columns of equal length
    all else     AdamW, eps 1e-20

m is the momentum, m <- beta m + (1 - beta) g, and for Muon nesterov's look ahead. An orthogonal matrix of this length
has elements of root mean square 0.2, as AdamW's updates have, so that one learning rate serves all.
Sources: V4 report 2.4, V4.1 report 3; Muon (Jordan et al. 2024); its scale: Liu et al. 2025.
"""

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pulls singular values to about 1
STEPS = 5
RMS = 0.2


def orthogonalise(m: Tensor) -> Tensor:
    """The nearest matrices with singular values near 1 (0.7 to 1.2), of m [..., rows, columns]; 0 stays 0."""
    a, b, c = COEFFICIENTS
    tall = m.shape[-2] > m.shape[-1]
    x = m.transpose(-1, -2) if tall else m
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-20)
    for _ in range(STEPS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


def balance(m: Tensor, iterations: int = 5) -> Tensor:
    """m [rows, columns] scaled by rows and by columns in turn, to root mean square RMS; rows of 0 stay so."""
    for _ in range(iterations):
        for dim in (1, 0):
            m = m / m.square().mean(dim, keepdim=True).sqrt().clamp(min=1e-20)
    return RMS * m


class ReportOptimizer(torch.optim.Optimizer):
    """Groups as `report_groups` makes them; `lr` and `weight_decay` as in AdamW."""

    def __init__(self, groups: list[dict], lr: float, beta: float = 0.95, betas: tuple[float, float] = (0.9, 0.95)):
        super().__init__(groups, {"lr": lr, "beta": beta, "betas": betas, "weight_decay": 0.0, "heads": 1})

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * self.update(p, group))

    def update(self, p: Tensor, group: dict) -> Tensor:
        """What a parameter moves by, over the learning rate."""
        state, g = self.state[p], p.grad
        if not state:
            state["step"], state["momentum"] = torch.zeros(()), torch.zeros_like(p)
            if group["kind"] == "vector":
                state["square"] = torch.zeros_like(p)
        state["step"] += 1
        m = state["momentum"]
        if group["kind"] == "vector":
            fast, slow = group["betas"]
            m.lerp_(g, 1 - fast)
            state["square"].lerp_(g.square(), 1 - slow)
            n = float(state["step"])
            return m / (1 - fast**n) / ((state["square"] / (1 - slow**n)).sqrt() + 1e-20)
        m.lerp_(g, 1 - group["beta"])
        if group["kind"] == "table":
            return balance(m)
        ahead = g.lerp(m, group["beta"])
        blocks = ahead.unflatten(-2, (group["heads"], -1))
        return (orthogonalise(blocks) * RMS * max(blocks.shape[-2:]) ** 0.5).flatten(-3, -2).view_as(p)


def report_groups(model: nn.Module, heads: int, decay: float, table_rate: float = 5.0) -> list[dict]:
    """Groups for `ReportOptimizer`: `wq_b` by heads, other matrices whole (each expert's by itself), tables, vectors.

    Engram's tables learn at `table_rate` times the rate, `times`.
    """
    found = {
        "by head": {"kind": "matrix", "heads": heads, "weight_decay": decay, "times": 1.0, "params": []},
        "matrix": {"kind": "matrix", "weight_decay": decay, "times": 1.0, "params": []},
        "table": {"kind": "table", "times": 1.0, "params": []},
        "memory": {"kind": "table", "times": table_rate, "params": []},
        "vector": {"kind": "vector", "times": 1.0, "params": []},
    }
    for name, p in model.named_parameters():
        if "engram.embed" in name:
            kind = "memory"
        elif name in ("embed.weight", "head.weight"):
            kind = "table"
        elif p.ndim == 1 or "hc_" in name or name.endswith(("q_weight", "k_weight")):
            kind = "vector"
        else:
            kind = "by head" if name.endswith("attn.wq_b.weight") else "matrix"
        found[kind]["params"].append(p)
    return [group for group in found.values() if group["params"]]

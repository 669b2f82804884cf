"""Gate and grouped experts beside the naive loop and the public library's V4 block, with the same weights."""

from functools import partial

import torch

from dsv41_edu.benchmarks.harness import Case, Skip
from dsv41_edu.config import preset
from dsv41_edu.moe.experts import Experts, experts_loop
from dsv41_edu.moe.gate import Gate

E, D, WIDTH, K = 64, 512, 256, 6


def library_parts(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Router and experts of `transformers`, in its default (grouped) form."""
    try:
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4TopKRouter
    except ImportError:
        raise Skip("transformers is not installed") from None
    config = DeepseekV4Config(
        hidden_size=D, moe_intermediate_size=WIDTH, n_routed_experts=E, num_experts_per_tok=K, swiglu_limit=10.0
    )
    config._experts_implementation = "grouped_mm"
    return DeepseekV4TopKRouter(config).to(dtype), DeepseekV4Experts(config).to(dtype)


@torch.no_grad()
def contestants(dtype: torch.dtype, tokens: int) -> tuple[dict, dict]:
    """Callables for the gate and for the experts, all on the same tokens and weights."""
    generator = torch.Generator().manual_seed(0)
    ours = Experts(E, D, WIDTH, limit=10.0).to(dtype)
    gate = Gate(preset("mini").replace(hidden_size=D, n_routed_experts=E, num_experts_per_tok=K))
    x = torch.randn(tokens, D, generator=generator).to(dtype)
    weights, indices = gate(x)
    w1, w3 = ours.w13.detach().chunk(2, dim=1)
    compiled = torch.compile(gate, dynamic=False)
    routers = {"ours": torch.no_grad()(partial(gate, x)), "ours, compiled": torch.no_grad()(partial(compiled, x))}
    experts = {
        "ours": torch.no_grad()(partial(ours, x, weights, indices)),
        "naive loop": torch.no_grad()(partial(experts_loop, x, weights, indices, w1, ours.w2.detach(), w3, 10.0)),
    }
    try:
        router, peer = library_parts(dtype)
    except Skip:
        return routers, experts
    router.float().weight.copy_(gate.weight)
    peer.gate_up_proj.copy_(ours.w13)
    peer.down_proj.copy_(ours.w2)
    routers["transformers"] = torch.no_grad()(partial(router, x.float()))
    experts["transformers"] = torch.no_grad()(partial(peer, x, indices, weights.to(dtype)))
    return routers, experts


def cases() -> list[Case]:
    """Two CPU cases for each number of tokens, and the experts in both dtypes."""
    found = []
    for tokens in (1, 32, 512):
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            routers, experts = contestants(dtype, tokens)
            work = f"T={tokens} E={E} d={D} width={WIDTH} k={K} {name} CPU"
            found.append(Case(f"moe.experts.{name}.{tokens}", work, experts))
            if dtype == torch.float32:
                found.append(Case(f"moe.gate.{tokens}", work, routers))
    return found

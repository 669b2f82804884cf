"""The router of five generations, one function.

    logits   l = W x / temperature                              fp32, W [E, d]
    affinity s = softmax(l), sigmoid(l) or sqrt(softplus(l))
    choice   the k largest of s + b, inside the kept groups     b selects, and touches nothing else
    weight   r_e = scale * s_e [/ (sum of the chosen s + 1e-20)]

The bias never enters a weight, and no gradient reaches it. Equal scores: the lowest expert id wins, on every
path. A hash-routed layer (V4's first three) reads its choice from a table of token ids instead; its weights are
the learned affinities all the same. Sources: DeepSeekMoE 3; V2 2.2; V3 2.1.2; V4 2.1; official inference code.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.config import ModelConfig

# In the renormalisation's denominator. As the scale below a tensor: of a number torch makes one anew at each use.
EPS = torch.tensor(1e-20, dtype=torch.float32, device="cpu")
FEW = 8192  # scores; more of them are sorted by numpy faster than torch.topk finds the best


def affinity(logits: Tensor, scoring_func: str) -> Tensor:
    """Scores [..., E] of logits [..., E], in their dtype, finite for any finite logit. Raises ValueError."""
    match scoring_func:
        case "sqrtsoftplus":  # torch's softplus is log(1 + exp(l)), and l itself above 20: nothing overflows
            return F.softplus(logits).sqrt_()
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(-1)
    raise ValueError(f"scoring_func = {scoring_func!r}: expected softmax, sigmoid or sqrtsoftplus")


def top_k_lowest(values: Tensor, k: int) -> Tensor:
    """Ids [..., k] of the k largest values [..., E], falling, the lowest of equals first.

    Raises ValueError for NaN; compiled, it can't look at what it computes, and NaN may come anywhere.
    """
    compiling = torch.compiler.is_compiling()
    by_keys = values.dtype == torch.float32 and (values.is_cpu or compiling)
    if values.requires_grad:  # none reaches an id
        values = values.detach()
    if by_keys and values.numel() <= FEW and not compiling:
        E = values.shape[-1]
        found = k + 1 if k < E else E
        best, indices = values.topk(found)
        best = best.numpy().ravel()  # torch's calls would cost more than the work
        falls = best[1:] < best[:-1]
        falls[found - 1 :: found] = True  # from one token to the next
        if np.count_nonzero(falls) == falls.size and found > 1:
            return indices.narrow_copy(-1, 0, k)  # no NaN, and no ties, which torch.topk breaks as it likes
    if not compiling and (np.isnan(values.numpy()) if by_keys else values.isnan()).any():
        raise ValueError("scores: expected numbers, got NaN")
    if by_keys:
        return top_k_by_keys(values, k)
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def top_k_by_keys(values: Tensor, k: int) -> Tensor:
    """The same of fp32 values by int64 keys, no two of them equal: the smallest first.

    Above, the bits of -value in an order that integers have too; below, in the 29 that fp64 adds to fp32, the id.
    """
    keys = (0.0 - values).double().view(torch.int64)  # 0.0 - 0.0 and 0.0 - -0.0 are both 0.0
    keys ^= (keys >> 63).bitwise_and_(0x7FFFFFFFE0000000)  # of a negative float, more bits mean less
    keys |= torch.arange(values.shape[-1], device=values.device)
    if torch.compiler.is_compiling():
        smallest = []
        for _ in range(k):  # a compiler makes one loop of it
            smallest.append(keys.amin(-1, keepdim=True))
            keys = keys.masked_fill(keys == smallest[-1], torch.iinfo(torch.int64).max)
        keys = torch.cat(smallest, -1)
    else:
        keys.numpy().sort()  # many times as fast as torch.sort
    return keys[..., :k] & 0x1FFFFFFF


def route(
    scores: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: str = "max",
    renormalise: bool = False,
    scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts and weigh them.

    scores: affinities float [..., E]; bias: float, broadcast against scores, added for the choice alone.
    Groups: the E experts stand in `n_group` equal groups (devices in V2, nodes in V3); only the `topk_group`
    best are eligible, by their largest score (`group_score="max"`, V2) or by the sum of their two largest
    ("top2", V3), both with the bias. Returns weights, float [..., k], and indices, int64 [..., k], by falling
    biased score. Raises ValueError for k > E, groups that don't divide, too few eligible experts, or NaN.
    """
    E = scores.shape[-1]
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k = {top_k}: expected 1 to {E}, the experts there are")
    choice = scores if bias is None else scores + bias  # no gradient comes back from indices
    if n_group != 1 or topk_group != 1:
        if E % n_group or not 1 <= topk_group <= n_group or topk_group * (E // n_group) < top_k:
            raise ValueError(
                f"n_group = {n_group}, topk_group = {topk_group}: expected a divisor of {E}, room for {top_k} experts"
            )
        if topk_group < n_group:
            choice = _mask_groups(choice, n_group, topk_group, group_score)
    indices = top_k_lowest(choice, top_k)
    return weigh(scores, indices, renormalise and top_k > 1, scale), indices


def _mask_groups(choice: Tensor, n_group: int, topk_group: int, group_score: str) -> Tensor:
    """-inf for every expert outside the best groups."""
    if group_score not in ("max", "top2"):
        raise ValueError(f"group_score = {group_score!r}: expected 'max' or 'top2'")
    grouped = choice.unflatten(-1, (n_group, -1))  # [..., G, E/G]
    of_two = min(2, grouped.shape[-1])
    best = grouped.amax(-1) if group_score == "max" else grouped.topk(of_two).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, top_k_lowest(best, topk_group), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def weigh(scores: Tensor, indices: Tensor, renormalise: bool, scale: float | Tensor) -> Tensor:
    """Weights [..., k] of chosen experts: their own scores, to sum 1 where renormalised, times the route scale."""
    weights = scores.gather(-1, indices)
    if renormalise:
        weights.div_(torch.sum(weights, -1, True).add_(EPS))
    return weights.mul_(scale)


def fuse(x: Tensor) -> bool:
    """Whether the fused kernels serve: on a GPU, in their dtypes, without gradients (they have no backward)."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and not torch.is_grad_enabled()


class Gate(nn.Module):
    """The router of one layer, by its config: DeepSeekMoE, V2, V3, V3.2, V4 or V4.1.

    `weight` [E, d] learns. `bias` [E] and, in V4.1, `bias_vl` [E] for image tokens are buffers that the balancing
    step moves. `tid2eid`, int [V, k], is the table of a hash-routed layer. `placement` (`dsv41_edu.moe.placement`),
    if set, maps the chosen experts to the replicas that hold them.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, drafter: bool = False, temperature: float = 1.0):
        super().__init__()
        c = config
        self.n_experts = c.dspark_n_routed_experts if drafter else c.n_routed_experts
        self.top_k = c.dspark_num_experts_per_tok if drafter else c.num_experts_per_tok
        self.scoring_func, self.temperature = c.scoring_func, temperature
        scale = torch.tensor(c.routed_scaling_factor, dtype=torch.float32, device="cpu")
        self.options = {
            "n_group": c.n_group or 1,
            "topk_group": c.topk_group or 1,
            "group_score": "top2" if c.topk_method == "noaux_tc" else "max",
            "renormalise": c.norm_topk_prob and self.top_k > 1,
            "scale": scale if scale.item() == c.routed_scaling_factor else c.routed_scaling_factor,
        }
        self.weight = nn.Parameter(torch.empty(self.n_experts, c.hidden_size))
        nn.init.normal_(self.weight, std=c.hidden_size**-0.5)
        hashed = layer < (c.num_hash_layers or 0)
        biased = c.topk_method == "noaux_tc" and not hashed
        two = biased and c.model_type == "deepseek_v41"
        self.register_buffer("bias", torch.zeros(self.n_experts) if biased else None)
        self.register_buffer("bias_vl", torch.zeros(self.n_experts) if two else None)
        table = torch.zeros(c.vocab_size, self.top_k, dtype=torch.int64) if hashed else None
        self.register_buffer("tid2eid", table)
        self.hashed, self.placement = hashed, None

    def scores(self, x: Tensor) -> Tensor:
        """Affinities [..., E] of tokens x [..., d], in fp32 (fp64 for fp64 input)."""
        weight = self._parameters["weight"]  # nn.Module finds an attribute in the time of an addition
        if not x.dtype == weight.dtype == torch.float32:
            wide = torch.promote_types(x.dtype, torch.float32)
            x, weight = x.to(wide), weight.to(wide)
        try:
            logits = F.linear(x, weight)
        except RuntimeError as error:
            if x.shape[-1:] == weight.shape[1:]:
                raise
            raise ValueError(f"x of shape {list(x.shape)}: expected {weight.shape[1]} channels last") from error
        return affinity(logits if self.temperature == 1 else logits / self.temperature, self.scoring_func)

    def forward(
        self,
        x: Tensor,
        image_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weights fp32 [..., k] and expert ids int64 [..., k] of tokens x [..., d].

        image_mask: bool [...], picks `bias_vl`; token_ids: int [...], for a hash-routed layer; positions: int [...],
        which spread a placement's replicas over the tokens (by default their order in x).
        Raises ValueError for shapes, a mask or ids that don't fit, an id outside the table; TypeError for dtypes.
        """
        if fuse(x) and positions is None and not self.hashed and self.options["n_group"] == 1:
            return self._fused(x, image_mask)
        scores = self.scores(x)
        if self.hashed:
            indices = self._look_up(token_ids, x.shape[:-1])
            weights = weigh(scores, indices, self.options["renormalise"], self.options["scale"])
        else:
            bias = self._buffers["bias"] if image_mask is None else self._bias(image_mask, x.shape[:-1])
            weights, indices = route(scores, self.top_k, bias=bias, **self.options)
        if self.placement is not None:
            indices = self.placement.to_physical(indices, positions)
        return weights, indices

    def _fused(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same in one kernel; NaN scores are never chosen there before a number, and raise nothing."""
        from kernels.gate import fused_gate

        self._check_mask(image_mask, x.shape[:-1])
        mask = None if image_mask is None else image_mask.flatten()
        held = self.placement
        weights, indices = fused_gate(
            x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0),
            self.weight,
            self.bias,
            self.bias_vl,
            mask,
            top_k=self.top_k,
            scoring_func=self.scoring_func,
            renormalise=self.options["renormalise"],
            scale=self.options["scale"],
            temperature=self.temperature,
            physical=None if held is None else held.logical_to_physical.contiguous(),
            counts=None if held is None else held.counts.contiguous(),
        )
        shape = (*x.shape[:-1], self.top_k)
        return weights.view(shape), indices.view(shape)

    def _bias(self, image_mask: Tensor, tokens: torch.Size) -> Tensor:
        self._check_mask(image_mask, tokens)
        return torch.where(image_mask.unsqueeze(-1), self.bias_vl, self.bias)

    def _check_mask(self, image_mask: Tensor | None, tokens: torch.Size) -> None:
        if image_mask is not None and self.bias_vl is None:
            raise ValueError("image_mask: expected none, this gate has one bias for all tokens")
        if image_mask is not None:
            _check("image_mask", image_mask, tokens, torch.bool)

    def _look_up(self, token_ids: Tensor | None, tokens: torch.Size) -> Tensor:
        if token_ids is None:
            raise ValueError("token_ids: expected the tokens' ids, this layer is routed by a hash table")
        _check("token_ids", token_ids, tokens, torch.int64, torch.int32)
        rows = self.tid2eid.shape[0]
        if token_ids.numel() and (int(token_ids.min()) < 0 or int(token_ids.max()) >= rows):
            raise ValueError(f"token_ids from {token_ids.min()} to {token_ids.max()}: expected 0 to {rows - 1}")
        return self.tid2eid[token_ids]


def _check(name: str, value: Tensor, tokens: torch.Size, *dtypes: torch.dtype) -> None:
    if value.dtype not in dtypes:
        raise TypeError(f"{name} is {value.dtype}: expected {dtypes[0]}")
    if value.shape != tokens:
        raise ValueError(f"{name} of shape {list(value.shape)}: expected {list(tokens)}, one for each token")

"""The gate in one kernel: product, affinity, choice, weights and placement; nothing but the result is written.

    l   = W x / temperature                      summed in fp32
    s   = softmax(l), sigmoid(l) or sqrt(softplus(l))
    I   = the k largest of s + b, the lowest id among equals; b is the image bias where the token is of an image
    r_e = scale * s_e [/ (sum of the chosen s + 1e-20)]
    id  = physical[e, token mod counts[e]]       where experts have replicas

A program has 32 tokens (16 in fp32) and all experts, so it reads their x once and W whole: with B = ceil(T / 32)
programs, T d elements of x, B E d of W, and per token k weights and k ids written. The affinities live and die in
registers. For a single token, one program reads all of W, no faster than one multiprocessor can. Every token is
summed in the same order wherever it stands in a batch, so its bits don't depend on the others.

To choose, each score becomes an int64: above, its 32 bits in an order that integers have too; below, the id
reversed. No two keys are equal, and the largest has the lowest id among equal scores. NaN sorts below every
number, -inf too, and the padding below NaN: an id is always one of the E, and a token of NaN gets 0 to k - 1 with
weights of NaN. (The reference in `dsv41_edu.moe.gate` raises; a GPU would have to wait for that.)

Without groups: what V2 and V3 restrict by device or node stays with the reference. Sources: V4 report 2.1;
official inference code.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.launch import tl, triton

SCORING = ("softmax", "sigmoid", "sqrtsoftplus")

# As many tokens and channels as fit the registers at 384 experts; fp32, without matrix units, needs more of them.
BFLOAT16 = {"OPERAND": tl.bfloat16, "BLOCK_T": 32, "BLOCK_D": 32}, 8
FLOAT32 = {"OPERAND": tl.float32, "BLOCK_T": 16, "BLOCK_D": 16}, 16


@triton.jit
def log1p(z):
    """log(1 + z) for 0 <= z <= 1, as 2 atanh(s), s = z / (2 + z) <= 1/3: no cancellation, where z is tiny either."""
    s = z / (2.0 + z)
    q = s * s
    series = 1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13))  # the next term is below fp32's last bit
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    return 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))


@triton.jit
def affinity(logits, real, SCORING: tl.constexpr):
    if SCORING == "softmax":
        logits = tl.where(real, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        return powers / tl.sum(powers, 1)[:, None]
    elif SCORING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logits))
    else:  # softplus(l) = max(l, 0) + log(1 + exp(-|l|)): nothing overflows
        return tl.sqrt(tl.where(logits > 0, logits, 0.0) + log1p(tl.exp(-tl.abs(logits))))


@triton.jit
def sort_keys(choice, real, experts):
    """int64 keys in the order of the scores; among equal scores the lower id has the greater key."""
    bits = choice.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of a negative float, more bits mean less
    ordered = tl.where(choice == choice, ordered, -2147483647)  # NaN below -inf, whose key is -2139095041
    ordered = tl.where(real, ordered, -2147483648)
    return (ordered.to(tl.int64) << 32) | (2147483647 - experts).to(tl.int64)


@triton.jit
def gate(
    x,  # [T, d]
    weight,  # [E, d]
    bias,  # fp32 [E] or None, as all up to counts
    bias_vl,  # fp32 [E]
    image_mask,  # bool [T]
    physical,  # int [E, R]
    counts,  # int [E]
    weights,  # fp32 [T, k], written
    indices,  # int64 [T, k], written
    T,
    d,
    E,
    R,
    x_row,
    weight_row,
    scale,
    temperature,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K up to a power of two
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    OPERAND: tl.constexpr,  # bf16 where x and W are: their products are exact in fp32
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    here, real = token < T, (expert < E)[None, :]
    x += token.to(tl.int64)[:, None] * x_row
    weight += expert.to(tl.int64)[None, :] * weight_row

    logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, d, BLOCK_D):
        channel = start + tl.arange(0, BLOCK_D)
        left = tl.load(x + channel[None, :], mask=here[:, None] & (channel < d)[None, :], other=0.0)
        right = tl.load(weight + channel[:, None], mask=(channel < d)[:, None] & real, other=0.0)
        logits = tl.dot(left.to(OPERAND), right.to(OPERAND), logits, input_precision="ieee")
    scores = affinity(logits / temperature, real, SCORING)

    choice = scores
    if bias is not None:
        added = tl.load(bias + expert, mask=expert < E, other=0.0)[None, :]
        if image_mask is not None:
            image = tl.load(image_mask + token, mask=here, other=0) != 0
            added = tl.where(image[:, None], tl.load(bias_vl + expert, mask=expert < E, other=0.0)[None, :], added)
        choice = scores + added
    keys = sort_keys(choice, real, expert[None, :])

    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros((BLOCK_T, SLOTS), tl.int32)
    kept = tl.zeros((BLOCK_T, SLOTS), tl.float32)
    for i in range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        is_best = keys == best
        chosen = tl.where(slot == i, 2147483647 - best.to(tl.int32), chosen)  # the lower half alone
        kept = tl.where(slot == i, tl.sum(tl.where(is_best, scores, 0.0), 1)[:, None], kept)
        keys = tl.where(is_best, -9223372036854775808, keys)
    if RENORMALISE and TOP_K > 1:
        kept = kept / (tl.sum(kept, 1)[:, None] + 1e-20)

    written = here[:, None] & (slot < TOP_K)
    if physical is not None:
        replica = token[:, None] % tl.load(counts + chosen, mask=written, other=1).to(tl.int32)
        chosen = tl.load(physical + chosen * R + replica, mask=written, other=0)
    place = token.to(tl.int64)[:, None] * TOP_K + slot
    tl.store(weights + place, kept * scale, mask=written)
    tl.store(indices + place, chosen.to(tl.int64), mask=written)


def fused_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    bias_vl: Tensor | None = None,
    image_mask: Tensor | None = None,
    *,
    top_k: int,
    scoring_func: str,
    renormalise: bool = False,
    scale: float = 1.0,
    temperature: float = 1.0,
    physical: Tensor | None = None,
    counts: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, k] and ids int64 [T, k] of tokens x [T, d], by falling biased score.

    x, weight [E, d]: bf16 or fp32, channels adjacent, rows at any stride. bias, bias_vl: fp32 [E]; image_mask:
    bool [T], picks `bias_vl`. physical: int [E, R] and counts: int [E] from 1 to R, as `logical_to_physical` and
    `counts` of `dsv41_edu.moe.placement`; the replica is (index in the batch mod counts). Their values aren't read
    here, which would make a GPU wait. Raises ValueError for shapes, strides, devices, groups, top_k outside 1 to E,
    a scoring function or parts that don't fit; TypeError for dtypes.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)}: expected [T, d] and [E, d]")
    (T, d), E = x.shape, len(weight)
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k = {top_k}: expected 1 to {E}, the experts there are")
    if scoring_func not in SCORING:
        raise ValueError(f"scoring_func = {scoring_func!r}: expected {', '.join(SCORING)}")
    if topk_group < n_group:
        raise ValueError(f"n_group = {n_group}: expected 1; for groups take dsv41_edu.moe.gate.route, the reference")
    for name, matrix in {"x": x, "weight": weight}.items():
        if matrix.dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"{name} is {matrix.dtype}: expected torch.bfloat16 or torch.float32")
        if matrix.stride(1) != 1 and d > 1:
            raise ValueError(f"{name} has strides {matrix.stride()}: expected its channels adjacent")
    if (image_mask is not None) and (bias is None or bias_vl is None):
        raise ValueError("image_mask: expected none without both bias and bias_vl")
    if (physical is None) != (counts is None):
        raise ValueError("physical and counts: expected both or none")
    R = physical.shape[-1] if physical is not None else 0
    integers = (torch.int64, torch.int32)
    expected = {
        "bias": (bias, (E,), (torch.float32,)),
        "bias_vl": (bias_vl, (E,), (torch.float32,)),
        "image_mask": (image_mask, (T,), (torch.bool,)),
        "physical": (physical, (E, R), integers),
        "counts": (counts, (E,), integers),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}: expected {dtypes[0]}")
        if tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} of shape {list(tensor.shape)}: expected {list(shape)}, contiguous")
    for name, tensor in ({"weight": weight} | {name: part[0] for name, part in expected.items()}).items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {x.device}, where x is")

    weights = torch.empty((T, top_k), dtype=torch.float32, device=x.device)
    indices = torch.empty((T, top_k), dtype=torch.int64, device=x.device)
    if T == 0:
        return weights, indices
    blocks, warps = BFLOAT16 if x.dtype == weight.dtype == torch.bfloat16 else FLOAT32
    # fmt: off
    gate[(triton.cdiv(T, blocks["BLOCK_T"]),)](
        x, weight, bias, bias_vl if image_mask is not None else None, image_mask, physical, counts, weights, indices,
        T, d, E, R, x.stride(0), weight.stride(0), float(scale), float(temperature),
        TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), SCORING=scoring_func, RENORMALISE=renormalise,
        BLOCK_E=max(16, triton.next_power_of_2(E)), num_warps=warps, **blocks,
    )
    # fmt: on
    return weights, indices


def _build(name: str, weight: str, how: tuple[dict, int], **given: str) -> Build:
    """The router of V4.1: 384 experts, 6 chosen, 5120 channels."""
    absent = {n: None for n in ("bias", "bias_vl", "image_mask", "physical", "counts") if n not in given}
    sizes = {"T": "i32", "d": "i32:16", "E": "i32:16", "R": "i32", "x_row": "i32:16", "weight_row": "i32:16"}
    pointers = {"x": "*bf16", "weight": weight, "weights": "*fp32", "indices": "*i64"}
    constants = {"TOP_K": 6, "SLOTS": 8, "SCORING": "sqrtsoftplus", "RENORMALISE": True, "BLOCK_E": 512}
    signature = pointers | given | sizes | {"scale": "fp32", "temperature": "fp32"}
    return Build(name, gate, signature, constants | absent | how[0], how[1])


GIVEN = {"bias": "*fp32", "bias_vl": "*fp32", "image_mask": "*i1"}
BUILDS = [
    _build("gate_bf16", "*bf16", BFLOAT16, **GIVEN, physical="*i64", counts="*i64"),
    _build("gate_fp32", "*fp32", FLOAT32, **GIVEN),
]

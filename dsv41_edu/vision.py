"""Images: a plain ViT, an aligner to the text's width, and the span of tokens that stands for a picture.

    patch -> 1024 channels;  32 blocks  x + attn(norm1 x),  x + mlp(norm2 x);  norm
    3 x 3 patches side by side -> w2 gelu(w1 .): one token of the text's width
    span of h x w tokens: start, then h times (w tokens, newline), end

Rotary in two dimensions: the first half of the angles by the row, the other by the column; channel c turns with
channel c + half (the text turns neighbours). Every token of a span has the id `image_token_id`.
Sources: V4.1 official inference code; vision config.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.attention.rope import frequencies
from dsv41_edu.config import VisionConfig

NORM_EPS = 1e-6


class VisionAttention(nn.Module):
    """Full attention among the patches of one image: `wqkv` and `wo`, with biases."""

    def __init__(self, v: VisionConfig):
        super().__init__()
        self.heads = v.num_attention_heads
        self.wqkv = nn.Linear(v.hidden_size, 3 * v.hidden_size)
        self.wo = nn.Linear(v.hidden_size, v.hidden_size)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        """[N, d] of patches x [N, d]; angle [N, width/2] of each patch's place."""
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q, k = (turn_halves(t, angle) for t in (q, k))
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


def turn_halves(x: Tensor, angle: Tensor) -> Tensor:
    """x [heads, N, width] with channel c and c + width/2 turned by angle [N, width/2], in at least fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).chunk(2, dim=-1)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class VisionMLP(nn.Module):
    """SwiGLU: `w1` holds the gate's rows, then the others."""

    def __init__(self, v: VisionConfig):
        super().__init__()
        self.w1 = nn.Linear(v.hidden_size, 2 * v.intermediate_size, bias=False)
        self.w2 = nn.Linear(v.intermediate_size, v.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, d] of x [N, d]."""
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class VisionBlock(nn.Module):
    """One block of the ViT."""

    def __init__(self, v: VisionConfig):
        super().__init__()
        self.attn, self.mlp = VisionAttention(v), VisionMLP(v)
        self.norm1, self.norm2 = (nn.RMSNorm(v.hidden_size, NORM_EPS) for _ in range(2))

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        """[N, d] of x [N, d]; angle as in `VisionAttention`."""
        x = x + self.attn(self.norm1(x), angle)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """`proj` [d, 3 patch^2] with bias."""

    def __init__(self, v: VisionConfig):
        super().__init__()
        self.proj = nn.Linear(3 * v.patch_size**2, v.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, d] of patches [N, 3, p, p]."""
        return self.proj(patches.flatten(1))


class Vision(nn.Module):
    """The encoder."""

    def __init__(self, v: VisionConfig):
        super().__init__()
        self.patch_embed = PatchEmbed(v)
        self.blocks = nn.ModuleList(VisionBlock(v) for _ in range(v.num_hidden_layers))
        self.norm = nn.RMSNorm(v.hidden_size, NORM_EPS)
        self.width, self.theta, self.patch = v.hidden_size // v.num_attention_heads, v.rope_theta, v.patch_size

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """[N, d] of an image's patches [N, 3, p, p], pixels in -1 to 1, row by row. Raises ValueError for shapes."""
        if rows < 1 or columns < 1:
            raise ValueError(f"rows = {rows}, columns = {columns}: expected one patch at least")
        expected = [rows * columns, 3, self.patch, self.patch]
        if list(patches.shape) != expected:
            raise ValueError(f"patches of shape {list(patches.shape)}: expected {expected} for {rows} x {columns}")
        freqs = frequencies(self.width // 2, self.theta).to(patches.device)
        place = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(freqs)
        angle = (place.unsqueeze(-1) * freqs).flatten(1)  # [N, width/2]: rows' angles, then columns'
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x, angle)
        return self.norm(x)


class Aligner(nn.Module):
    """Merge `downsample_ratio` x `downsample_ratio` patches and project them to the text's width."""

    def __init__(self, v: VisionConfig, d: int):
        super().__init__()
        self.ratio = v.downsample_ratio
        self.w1 = nn.Linear(v.hidden_size * self.ratio**2, d)
        self.w2 = nn.Linear(d, d)

    def merge(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """[tokens, ratio^2 d], channels outermost, of x [rows columns, d]; zeros beyond the bottom and right edge."""
        r = self.ratio
        grid = F.pad(x.T.unflatten(1, (rows, columns)), (0, -columns % r, 0, -rows % r))
        return F.unfold(grid.unsqueeze(0), r, stride=r)[0].T

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """[tokens, d of the text], row by row, of an encoded image x [rows columns, d]."""
        return self.w2(F.gelu(self.w1(self.merge(x, rows, columns))))


def merged(v: VisionConfig, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of tokens that rows x columns of patches become. Raises ValueError for too many tokens."""
    h, w = -(-rows // v.downsample_ratio), -(-columns // v.downsample_ratio)
    if h * w > v.max_image_tokens:
        raise ValueError(f"{rows} x {columns} patches: expected at most {v.max_image_tokens} tokens of them")
    return h, w


def span_length(h: int, w: int) -> int:
    """Tokens of the span of an image of h x w merged patches."""
    return h * (w + 1) + 2


def span(tokens: Tensor, h: int, w: int, start: Tensor, newline: Tensor, end: Tensor) -> Tensor:
    """Rows [span, d] in place of the embeddings of a span, of tokens [h w, d] and three learned vectors [d]."""
    lines = torch.cat([tokens.unflatten(0, (h, w)), newline.expand(h, 1, -1)], dim=1).flatten(0, 1)
    return torch.cat([start.unsqueeze(0), lines, end.unsqueeze(0)])

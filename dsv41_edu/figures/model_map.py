"""The whole model on one picture: what flows where, and the five mechanisms in it."""

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from dsv41_edu.config import ModelConfig
from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish


def model_map(config: ModelConfig) -> Drawing:
    """Token ids at the left, layers in the middle, verified tokens at the right; one layer enlarged below."""
    c, L = config, config.num_hidden_layers
    roles = [layer_role(c, layer) for layer in range(L)]
    with canvas(10, 6.2) as figure:
        ax = figure.subplots()
        x0, width = 14.0, 62.0
        step = width / L

        # the residual streams run through everything
        for k in range(c.hc_mult):
            y = 40.6 + k * 0.75
            ax.plot([11.5, x0 + width + 2.5], [y, y], color=style.RED, linewidth=1.1, zorder=1)
        for layer, role in enumerate(roles):
            ax.add_patch(
                Rectangle(
                    (x0 + layer * step + 0.15, 38.5), step - 0.3, 6.5, facecolor=ROLES[role][0], edgecolor="none"
                )
            )
        for layer in (0, *c.kv_source_layer_ids, L - 1):
            ax.text(x0 + (layer + 0.5) * step, 37.8, str(layer), ha="center", va="top", fontsize=8)
        start = x0 + c.decoder_start * step
        ax.plot([start, start], [33.2, 47.5], color=style.INK, linewidth=1, linestyle=":")
        ax.text(start - 0.6, 34.6, "a prompt token stops here", ha="right", fontsize=8)

        _label(ax, 0, 38.5, 11, 6.5, "embedding\n" + f"{c.vocab_size:,} ids", style.YELLOW)
        _label(ax, x0 + width + 3, 38.5, 8, 6.5, "head", style.YELLOW)
        _label(
            ax,
            x0 + width + 13,
            36.3,
            11,
            11,
            f"5 DSpark\n{c.num_nextn_predict_layers} blocks draft\n{c.dspark_block_size} tokens",
            style.GREY,
        )
        _arrow(ax, (x0 + width + 11.1, 41.7), (x0 + width + 12.9, 41.7))
        ax.text(x0 + width + 18.5, 34.9, "verified by one\nbackbone step", ha="center", va="top", fontsize=8)

        rows = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        _label(ax, 0, 55, 26, 6.5, f"4 Engram: {rows} table rows a module,\nknown from the ids alone", style.GREEN)
        ax.plot([5.5, 5.5], [45.1, 54.9], color=style.INK, linewidth=1)
        for layer in c.engram_layer_ids:
            x = x0 + (layer + 0.5) * step
            ax.plot(
                [26.1, x] if x > 26.1 else [x, x],
                [58, 58] if x > 26.1 else [54.9, 54.9],
                color=style.INK,
                linewidth=1,
            )
            _arrow(ax, (x, 58 if x > 26.1 else 54.9), (x, 45.2))
            ax.text(x + 0.5, 48.6, f"layer {layer}", fontsize=8)

        for i, (colour, words) in enumerate(ROLES.values()):
            ax.add_patch(
                Rectangle(
                    (
                        x0 + 30 + (i % 2) * 26,
                        55.6 - (i // 2) * 3.4,
                    ),
                    1.6,
                    1.6,
                    facecolor=colour,
                )
            )
            ax.text(x0 + 32.4 + (i % 2) * 26, 56.3 - (i // 2) * 3.4, words, fontsize=8, va="center")

        _layer(ax, c, x0, roles)
        ax.set(xlim=(-0.5, 101), ylim=(-0.5, 62))
        ax.axis("off")
        return finish(
            figure,
            alt=f"Map of the model: token ids feed the embedding and the Engram tables; {c.hc_mult} residual streams "
            f"run through {L} layers, each a seam, attention, a seam and experts; a head and a drafter end it.",
            caption="The whole model. One layer is enlarged below; the numbers are the book's chapters.",
            data={"roles": roles, "engram": list(c.engram_layer_ids), "rows": rows, "streams": c.hc_mult},
        )


ROLES = {
    "window": ("#c9c9c9", "window only"),
    "source": (style.ORANGE, "makes a global cache and an index"),
    "index": (style.PINK, "asks the last source's index anew"),
    "reuse": (style.SKY, "reuses cache and indices"),
}


def layer_role(config: ModelConfig, layer: int) -> str:
    """What a layer's attention does with the global cache: window, source, index or reuse."""
    if config.compress_ratios[layer] == 0:
        return "window"
    if layer in config.kv_source_layer_ids:
        return "source"
    return "index" if layer in config.index_source_layer_ids else "reuse"


def _layer(ax: Axes, c: ModelConfig, x0: float, roles: list[str]) -> None:
    """One layer enlarged: two seams around attention and experts."""
    ax.add_patch(
        FancyBboxPatch((x0, 3), 86, 25, boxstyle="round,pad=0.3", facecolor="none", edgecolor=style.INK, linewidth=1)
    )
    step = 62.0 / len(roles)
    at = x0 + 31 * step
    ax.plot([at + 0.15, x0], [38.4, 28.3], color=style.FAINT, linewidth=1)
    ax.plot([at + step - 0.15, x0 + 86], [38.4, 28.3], color=style.FAINT, linewidth=1)
    for k in range(c.hc_mult):
        y = 13.3 + k * 0.75
        ax.plot([x0 + 0.5, x0 + 85.5], [y, y], color=style.RED, linewidth=1.1, zorder=1)
    coefficients = c.hc_mult * (c.hc_mult + 2)
    for x in (x0 + 2, x0 + 40):
        _label(ax, x, 11.2, 13, 6.4, f"3 mHC seam\n{coefficients} coefficients", style.RED)
    entries = f"{c.num_attention_heads} heads on one latent\nwindow {c.sliding_window}\n+ {c.index_topk} entries"
    _label(ax, x0 + 18, 9.6, 19, 9.6, f"attention\n{entries}", style.ORANGE)
    _label(ax, x0 + 56, 19, 13, 6, f"2 router\ntop {c.num_experts_per_tok} of {c.n_routed_experts}", style.SKY)
    n, w = 16, 1.6
    for i in range(n):
        chosen = i in (1, 4, 5, 9, 12, 14)[: c.num_experts_per_tok]
        colour = style.BLUE if chosen else "#c9c9c9"
        ax.add_patch(Rectangle((x0 + 57 + i * w, 11.6), w - 0.3, 5.6, facecolor=colour, edgecolor="none"))
    ax.text(x0 + 57, 10.4, f"experts, {c.moe_intermediate_size} wide; one shared by all", fontsize=8, va="top")
    ax.add_patch(Rectangle((x0 + 83.6, 11.6), 1.3, 5.6, facecolor=style.GREEN, edgecolor="none"))
    _arrow(ax, (x0 + 62.5, 18.9), (x0 + 62.5, 17.4))
    ax.text(
        x0 + 2,
        5.6,
        f"1 Accounting: a token multiplies {c.num_experts_per_tok} + {c.n_shared_experts} experts "
        f"of {c.n_routed_experts + c.n_shared_experts} in every layer",
        fontsize=9,
        va="center",
    )


def _label(ax: Axes, x: float, y: float, w: float, h: float, words: str, colour: str) -> None:
    ax.add_patch(
        FancyBboxPatch(
            (x, y), w, h, boxstyle="round,pad=0,rounding_size=0.8", facecolor=colour, edgecolor="none", zorder=2
        )
    )
    ax.text(x + w / 2, y + h / 2, words, ha="center", va="center", fontsize=8, color=style.ON_COLOUR, zorder=3)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": style.INK, "linewidth": 1})

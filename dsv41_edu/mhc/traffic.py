"""What the seams of a model read and write: elements of streams, of F's output and of its next input.

    floor      (2n + 2) d    read n streams and F's output; write n streams and the next input
    two-pass   (3n + 2) d    the collapse waits for the coefficients of the new streams, and reads them again
    separate   (4n + 4) d    expand, project, collapse and norm one after the other, as V4 was first served

Per token and seam; parameters and coefficients are left out: the first are shared by all tokens of a tile, the
second are n^2 + 2n numbers. Source: V4.1 report 2.4.1.
"""

from dsv41_edu.config import ModelConfig


def floor(n: int, d: int) -> int:
    """Elements of the single-pass form."""
    return (n + 1) * d + (n + 1) * d


def two_pass(n: int, d: int) -> int:
    """Elements where one kernel expands and projects, and another collapses and norms."""
    expand_and_project = (n + 1) * d + n * d
    collapse = n * d + d
    return expand_and_project + collapse


def separate(n: int, d: int) -> int:
    """Elements where each step is a kernel of its own."""
    expand = (n + 1) * d + n * d
    project = n * d
    collapse = n * d + d
    norm = d + d
    return expand + project + collapse + norm


def seams(config: ModelConfig) -> int:
    """Seams that a token passes: one around each layer's attention, one around its experts."""
    return 2 * config.num_hidden_layers

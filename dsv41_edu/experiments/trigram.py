"""A strong control on a small text: the trigram of Witten and Bell.

    P(w | u v) = (c(u v w) + t(u v) P(w | v)) / (c(u v) + t(u v))     t: how many different tokens followed
    and so down: P(w | v) by bigrams, P(w) by counts, below it every token alike

What no trigram can beat has learned more than three tokens' company. Source: Witten and Bell 1991.
"""

import math
from collections import Counter
from collections.abc import Sequence


class Trigram:
    """Counts of a text's tokens, integers below `size`."""

    def __init__(self, tokens: Sequence[int], size: int):
        self.size = size
        self.followed: list[Counter] = []  # by context length: how often a context was followed
        self.kinds: list[Counter] = []  # by how many different tokens
        self.seen: list[Counter] = []  # contexts with what followed them
        for n in range(3):
            seen = Counter(zip(*(tokens[i:] for i in range(n + 1)), strict=False))
            followed, kinds = Counter(), Counter()
            for gram, count in seen.items():
                followed[gram[:-1]] += count
                kinds[gram[:-1]] += 1
            self.followed.append(followed)
            self.kinds.append(kinds)
            self.seen.append(seen)

    def probability(self, token: int, context: tuple[int, ...]) -> float:
        """Of a token after the last two (or fewer) tokens before it."""
        p = 1 / self.size
        for n in range(len(context) + 1):
            last = context[len(context) - n :]
            count, kinds = self.followed[n][last], self.kinds[n][last]
            if count:
                p = (self.seen[n][(*last, token)] + kinds * p) / (count + kinds)
        return p

    def nats(self, tokens: Sequence[int]) -> float:
        """Mean -ln P of tokens[1:], each after the two before it, or the one that there is."""
        loss = 0.0
        for i in range(1, len(tokens)):
            loss -= math.log(self.probability(tokens[i], tuple(tokens[max(0, i - 2) : i])))
        return loss / (len(tokens) - 1)

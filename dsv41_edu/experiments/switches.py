"""A trained model without one of its mechanisms, not trained again: what does its loss gain?

`without(model, name)` changes a copy: a function or a number in it is another one, all else is the same.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from dsv41_edu.layer import first_pass
from dsv41_edu.mhc.seam import single_pass
from dsv41_edu.model import Transformer


def no_memory(model: Transformer) -> None:
    for layer in model.layers:
        layer.add_memory = lambda *_: None


def no_entries(model: Transformer) -> None:
    choose_by(model, lambda scores: torch.full((*scores.shape[:2], 1), -1))


def newest_entries(model: Transformer) -> None:
    newest = torch.arange(model.config.index_topk)
    choose_by(model, lambda scores: (~scores.isneginf()).sum(-1, keepdim=True) - 1 - newest)


def choose_by(model: Transformer, choice: Callable[[Tensor], Tensor]) -> None:
    """Another choice of entries by the scores [B, S, N], which are -inf where an entry is hidden; below 0: none."""
    for layer in model.layers:
        if (a := layer.attn).indexer is not None:

            def choose(x, qr, turn, chunk, a=a, scored=a.choose):
                scored(x, qr, turn, chunk)
                return choice(chunk.scores[a.layer]).clamp(min=-1)

            a.choose = choose


def window_of_one(model: Transformer) -> None:
    for layer in model.layers:
        layer.attn.config = model.config.replace(sliding_window=1)


def no_sinks(model: Transformer) -> None:
    for layer in model.layers:
        layer.attn.attn_sink.data.fill_(float("-inf"))


def no_routed_experts(model: Transformer) -> None:
    for layer in model.layers:
        layer.ffn.experts.w2.data.zero_()


def no_shared_expert(model: Transformer) -> None:
    for layer in model.layers:
        layer.ffn.shared_experts.w2.data.zero_()


def no_bias(model: Transformer) -> None:
    for layer in model.layers:
        layer.ffn.gate.bias.zero_()


def no_mixing(model: Transformer) -> None:
    def alone(seam: Callable) -> Callable:
        def run(*arguments):
            *rest, comb = seam(*arguments)
            return *rest, torch.eye(comb.shape[-1]).expand_as(comb).to(comb)

        return run

    model.seams = alone(first_pass), alone(single_pass)


SWITCHES: dict[str, Callable[[Transformer], None]] = {
    "n-gram memory": no_memory,
    "all compressed entries": no_entries,
    "the indexer: newest entries instead": newest_entries,
    "the window, but for the token itself": window_of_one,
    "sinks": no_sinks,
    "routed experts": no_routed_experts,
    "shared expert": no_shared_expert,
    "selection bias": no_bias,
    "mixing of the streams": no_mixing,
}


def without(model: Transformer, name: str) -> Transformer:
    """A copy of the model that lacks a mechanism. Raises KeyError for a name that isn't one of `SWITCHES`."""
    changed = copy.deepcopy(model)
    SWITCHES[name](changed)
    return changed

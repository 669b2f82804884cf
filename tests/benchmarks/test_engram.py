"""The contestants of the hash do the same work."""

import torch

from dsv41_edu.benchmarks.engram import as_the_demo_does, plain_hash
from dsv41_edu.engram.hashing import NgramHash


def test_every_hash_gives_the_same_rows():
    hasher = NgramHash((1, 4, 7), order=4, heads=2, first=53, size=97, pad=72)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    expected, _ = hasher(ids)
    assert torch.equal(plain_hash(ids, *hasher.on(ids.device), hasher.pad), expected)
    for layer, rows in enumerate(as_the_demo_does(hasher, ids.numpy())):
        assert (rows == expected[:, :, layer].numpy()).all()

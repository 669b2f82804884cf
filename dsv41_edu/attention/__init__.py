"""Attention over a window and a few selected entries of one shared latent: rotary, compressor, indexer, cache."""

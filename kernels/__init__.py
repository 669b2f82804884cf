"""The fused paths in Triton, one file each."""

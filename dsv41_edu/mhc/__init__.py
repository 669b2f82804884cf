"""Residual streams: hyper-connections, their manifold-constrained form (mHC), and the single-pass seam of V4.1."""

"""The hashed n-gram memory: compressed vocabulary, hash, table, prefetch, gate."""

"""The benchmarks: our functions timed beside other implementations of the same thing."""

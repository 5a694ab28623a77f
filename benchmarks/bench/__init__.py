"""What the benchmarks are made of: the common document, the peer's environment, and a package for each."""

"""The process beside each rank of an in-process restart, and the hub that all of them talk to; no torch."""

"""Public fakes behind the same protocols as the real parts."""

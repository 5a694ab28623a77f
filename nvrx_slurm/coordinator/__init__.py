"""One per job: membership, cycles, budget, journal, merged logs."""

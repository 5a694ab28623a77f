"""Slurm's Prolog, Epilog and HealthCheckProgram: what the checks find, and what is done about it."""

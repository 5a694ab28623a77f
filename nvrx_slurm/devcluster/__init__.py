"""A real Slurm cluster on one machine, each node in its own namespaces."""

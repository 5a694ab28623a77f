"""Start a job without Slurm: what ``nvrx-launch`` does on each node, with torchrun's way of meeting."""

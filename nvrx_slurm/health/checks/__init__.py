"""One file per kind of signal; see :mod:`nvrx_slurm.health.registry` for how a check is declared."""

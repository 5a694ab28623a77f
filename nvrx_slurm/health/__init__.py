"""Is this node fit for a job? One file per check, run side by side under one time budget."""

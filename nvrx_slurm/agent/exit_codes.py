"""What an agent's exit code says; for the agent's parent, which must not import the agent."""

EXIT_OK = 0
EXIT_COORDINATOR_GONE = 1
EXIT_USAGE = 2
EXIT_EXCLUDED = 3
EXIT_COORDINATOR_SILENT = 4
"""The host of the Coordinator does not answer. No rank is left; somebody has to find out who is cut off."""

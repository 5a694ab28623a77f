"""One per node: workers, warm start, rank monitors, log lines."""

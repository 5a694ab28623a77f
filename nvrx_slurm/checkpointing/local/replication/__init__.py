"""Which ranks keep copies of whose parts, and how copies travel."""

"""One job through many faults of random kind: it must lose nothing, leak nothing, and learn what it must."""

"""What a save that has failed raises."""


class AsyncSaveError(RuntimeError):
    """A save has failed, on this rank or another; it counts nowhere. Training can go on and save again."""

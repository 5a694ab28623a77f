"""Stands in for torch where a test is not about it: the real one takes seconds to import."""


class cuda:
    @staticmethod
    def is_initialized() -> bool:
        return False

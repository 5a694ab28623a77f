"""The training text: what every machine with Python has, the source of its standard library."""

import random
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

SIZE = 2 * 1024 * 1024  # bytes; enough for minutes of training, read in a few milliseconds


class Text:
    """Bytes that are the same on every rank, and batches that depend on nothing but their arguments."""

    def __init__(self) -> None:
        content = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name):
            content += path.read_bytes()
            if len(content) >= SIZE:
                break
        self.tokens = torch.frombuffer(content[:SIZE], dtype=torch.uint8)
        self.checksum = zlib.crc32(content[:SIZE])

    def batch(self, *, seed: int, step: int, rank: int, batch: int, block: int) -> tuple[Tensor, Tensor]:
        """Tokens and their successors. The step is the whole data position: a checkpoint keeps no other."""
        # Seeding with a string goes through SHA-512: near steps and ranks still draw unrelated places.
        draw = random.Random(f"{seed}/{step}/{rank}")
        starts = [draw.randrange(len(self.tokens) - block) for _ in range(batch)]
        window = torch.stack([self.tokens[start : start + block + 1] for start in starts]).long()
        return window[:, :-1], window[:, 1:]

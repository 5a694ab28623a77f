"""A GPT small enough that eight of them train on two CPU cores: about 360 000 parameters by default."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # one token per byte value, so there is no tokenizer to agree on


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        # Written out: the fused kernels' backward passes add up in no fixed order on some GPUs.
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads), nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, *, block: int, layers: int, heads: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, in nats per byte, of predicting each target from the tokens up to it."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.dropout(self.tokens(tokens) + self.positions(position)))
        logits = self.norm(x) @ self.tokens.weight.T  # the embedding serves as the output layer too
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

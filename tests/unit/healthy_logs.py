"""Output of jobs that nothing is wrong with, as several frameworks print it."""

from __future__ import annotations

import random
from collections.abc import Callable

_NOISE = [
    "resumed from step 60",
    "NCCL INFO Channel 00/0 : 3[3] -> 2[2] via P2P/CUMEM",
    "2026-11-30 10:00:00,123 - INFO - watchdog timeout is 600 s, heartbeat 60 s",
    "W1130 10:00:00.1 91 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment "
    "variable for each process",
    "UserWarning: torch.utils.checkpoint: please pass in use_reentrant explicitly",
    "[WARNING|modeling_utils.py:1] Some weights were not initialized from the model checkpoint",
    "  exit_on_missing_checkpoint ...................... False",
    "  nccl_communicator_config_path ................... None",
    "WARNING: could not find TransformerEngine, falling back to local layers",
    "rank 3 memory (MB) | allocated: 1024.5 | max allocated: 4096.0 | reserved: 5000.0",
    "validation loss at iteration 100 | lm loss value: 2.1E+00 | lm loss PPL: 8.1E+00",
    "saving checkpoint at iteration     100 to /ckpt in torch_dist format",
    "> building train, validation, and test datasets ...",
    "Using the legacy behaviour, retrying (1/3) succeeded",
    "0 errors, 0 failed, 12 skipped",
    "gradient overflow, skipping step, reducing loss scale to 32768",
    "INFO:root:Error feedback compression enabled",
    "wandb: Run data is saved locally in /x/wandb/run-20261130",
    "epoch 3 eval: accuracy 0.91, error 0.09, failed samples: 0",
]


def _megatron(n: int, rng: random.Random) -> str:
    return (
        f" [2026-11-30 10:{n // 60 % 60:02d}:{n % 60:02d}] iteration {n:8d}/  500000 | consumed "
        f"samples: {n * 256:12d} | "
        f"elapsed time per iteration (ms): {rng.uniform(900, 950):.1f} | lm loss: {rng.uniform(1, 9):.6E} | "
        "loss scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


_STEPS: dict[str, Callable[[int, random.Random], str]] = {
    "examples": lambda n, rng: f"step {n}/100000  loss {rng.random():.4f}",
    "megatron": _megatron,
    "lightning": lambda n, rng: (
        f"Epoch {n // 400}:  {n % 400 // 4}%|###  | {n % 400}/400 [00:{n % 60:02d}<01:00,  "
        f"4.1it/s, v_num=3, loss={rng.random():.3f}]"
    ),
    "hf": lambda n, rng: (
        f"{{'loss': {rng.random():.4f}, 'grad_norm': {rng.random():.3f}, 'epoch': {n / 100:.2f}}}"
    ),
    "tqdm": lambda n, rng: f" {n % 100}%|####      | {n}/100000 [00:{n % 60:02d}<10:00, 3.2it/s]",
    "deepspeed": lambda n, rng: (
        f"[2026-11-30 10:00:00,1] [INFO] [logging.py:96:log_dist] [Rank 0] step={n}, skipped=0, "
        f"lr=[1e-05], mom=[(0.9, 0.9)]"
    ),
    "torchtitan": lambda n, rng: (
        f"[titan] INFO - step: {n:5d}  loss: {rng.random():7.4f}  memory: 30.1GiB(38%)  tps: 4,201"
    ),
    "maxtext": lambda n, rng: (
        f"completed step: {n}, seconds: 1.2, TFLOP/s/device: 300.1, loss: {rng.random():.3f}"
    ),
    "nanogpt": lambda n, rng: f"iter {n}: loss {rng.random():.4f}, time 120.31ms, mfu 40.1%",
}


def healthy(count: int, framework: str | None = None) -> list[str]:
    """Return ``count`` lines of one framework, or of all in turn, with what else such jobs print."""
    rng = random.Random(1)
    names = [framework] if framework else list(_STEPS)
    lines = []
    for n in range(1, count + 1):
        noise = rng.random() < 0.2
        lines.append(rng.choice(_NOISE) if noise else _STEPS[names[n * len(names) // (count + 1)]](n, rng))
    return lines

"""Train a small character-level GPT; interrupted or not, the loss curve is the same to the last bit.

    nvrx-srun examples/train_gpt.py                      in a Slurm job: faults are survived
    torchrun --nproc-per-node 2 examples/train_gpt.py    without Slurm
    python examples/train_gpt.py --steps 5               one process

A script needs two things to be restarted at any moment: checkpoints that it resumes from by itself
(`gpt/checkpoints.py`, `Training.state` below), and a heartbeat that says it still makes progress
(`client` in `main`). The rest of this file is ordinary data-parallel training.
"""

import argparse
import math
import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import checkpoints
from gpt.losses import LossFile
from gpt.model import GPT
from gpt.pace import Pace
from gpt.text import Text
from torch import Tensor, nn

from nvrx_slurm.fault_tolerance import RankMonitorClient

WARM_UP_STEPS = 20


def main(
    argv: list[str] | None = None, on_phase: Callable[[str, int], None] = lambda phase, step: None
) -> None:
    """Train to the last step, or until asked to stop; `on_phase` is told of what a restart goes through."""
    options = parse_options(argv)
    ranks = join_process_group(options.backend)
    on_phase("process_group", 0)

    training = Training(options, ranks)
    near = options.ckpt in ("local", "ladder")
    resumed = not near and training.resume()
    on_phase("loaded", training.step)

    # Outside nvrx-srun the client does nothing, so the script needs no other mode for that.
    client = RankMonitorClient()
    client.init_workload_monitoring()
    if resumed and ranks.first:
        client.report_checkpoint_loaded(training.step)
    if near:
        training.resume_near(client)

    pace = Pace(options.straggler_interval, options.stop_if_straggler)
    losses = LossFile(options.out / "loss.jsonl") if ranks.first else None
    stop = False
    while training.step < options.steps and not stop:
        loss, stop = training.run_step(pace, want_stop=client.should_stop())
        stop = pace.end_step() or stop
        client.send_heartbeat(step=training.step)
        on_phase("step", training.step)
        if losses:
            losses.append(training.step, loss)
            if training.step % 10 == 0 or training.step == 1:
                print(f"step {training.step}/{options.steps}  loss {loss:.4f}", flush=True)
        last = stop or training.step == options.steps
        if near:
            training.save_near(last=last)
        elif last or training.step % options.ckpt_every == 0:
            training.save()
        for step in training.newly_saved(wait=last):
            client.report_checkpoint_saved(step)
    pace.close()
    if training.background:
        training.background.close()
    if losses:
        losses.close()
        ending = "stopped as asked, checkpoint saved" if stop else "finished"
        print(f"{ending} at step {training.step}/{options.steps}", flush=True)

    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, tensor: Tensor) -> Tensor:
        """One row for each rank. Not torch's gather_object: that needs NumPy."""
        own = tensor.to(self.device)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own)
        return torch.stack(rows).cpu()


def join_process_group(backend: str, store: dist.Store | None = None) -> Ranks:
    """Meet the other ranks in `store`, or as torchrun says in the environment; alone if it does not."""
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= gpus:
            sys.exit(
                f"local rank {local_rank} has no GPU, this node shows {gpus}: "
                "start fewer ranks or use --backend gloo"
            )
        # cuBLAS adds up in a fixed order only with this set before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # the ranks are the parallelism, and one thread adds up in one order
    torch.use_deterministic_algorithms(True)
    if store is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    elif "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, init_method="env://")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


class Training:
    """Everything that a step changes, so everything that a checkpoint holds."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options = options
        self.ranks = ranks
        self.text = Text()
        self.step = 0  # steps done; also the position in the data
        torch.manual_seed(options.seed)  # the same first weights on every rank …
        self.model = GPT(block=options.block, layers=options.layers, heads=options.heads, width=options.width)
        self.model.to(ranks.device)
        # … and then a dropout of each rank's own.
        torch.manual_seed(options.seed + 1 + ranks.rank)
        random.seed(options.seed + 1 + ranks.rank)
        self.gradients = FlatGradients(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._learning_rate_factor)
        self.files: Any = checkpoints
        self.background: Any = None
        self._saved: list[int] = []
        if options.ckpt == "async":
            from gpt import background

            self.files = background
            self.background = background.Saver(options.out) if ranks.first else None

    def run_step(self, pace: Pace, *, want_stop: bool) -> tuple[float, bool]:
        """One optimizer step: the loss averaged over all ranks, and whether any of them wants to stop."""
        options = self.options
        with pace.section("load"):
            tokens, targets = self.text.batch(
                seed=options.seed,
                step=self.step,
                rank=self.ranks.rank,
                batch=options.batch,
                block=options.block,
            )
        with pace.section("compute"):
            self.gradients.zero()
            loss = self.model(tokens.to(self.ranks.device), targets.to(self.ranks.device))
            loss.backward()
        mean_loss, stop = self.gradients.average_over_ranks(loss.detach(), want_stop)
        self.optimizer.step()
        self.scheduler.step()
        time.sleep(options.step_delay)
        self.step += 1
        return mean_loss, stop

    def save(self) -> None:
        """All ranks call this: each gives its random state, the first one writes."""
        rng = {name: self.ranks.gather(state) for name, state in rng_state(self.ranks.device).items()}
        if not self.ranks.first:
            return
        state = self.state() | {"rng": rng}
        if self.background:
            self.background.save(self.step, state)
        else:
            checkpoints.save(self.options.out, self.step, state)
            self._saved.append(self.step)

    def newly_saved(self, *, wait: bool) -> list[int]:
        """The steps whose checkpoints this rank has got to disk since the last call."""
        if self.background:
            return self.background.committed(wait=wait)
        saved, self._saved = self._saved, []
        return saved

    def resume(self) -> bool:
        """Continue from the newest readable checkpoint, the same one on all ranks; False if there is none."""
        found, state = -1, None
        if self.ranks.first:
            self.options.out.mkdir(parents=True, exist_ok=True)
            self.files.remove_leftovers(self.options.out)
            if newest := self.files.load_newest(self.options.out):
                found, state = newest
        fingerprint = zlib.crc32(repr(self.settings()).encode())
        first_has = torch.tensor([found, fingerprint], device=self.ranks.device)
        dist.broadcast(first_has, src=0)
        step, first_fingerprint = first_has.tolist()
        if fingerprint != first_fingerprint:
            sys.exit(
                f"rank {self.ranks.rank} has another text or other options than rank 0: "
                f"do all nodes run the same Python? ({self.settings()})"
            )
        if step < 0:
            return False
        # Each rank reads the file that rank 0 could read, and fails loudly rather than start elsewhere.
        self.load_state(state or self.files.load(self.files.path_of(self.options.out, step)))
        if self.ranks.first:
            print(f"resumed from step {step}", flush=True)
        return True

    def resume_near(self, journal: RankMonitorClient) -> None:
        """As `resume`, from this rank's own state in the newest of the nodes' checkpoints."""
        from gpt.near import NearCheckpoints

        options = self.options
        shared_dir = options.out / "shared" if options.ckpt == "ladder" else None
        self.near = NearCheckpoints(options.local_dir, shared_dir, options.ckpt_every, journal)
        options.out.mkdir(parents=True, exist_ok=True)
        if state := self.near.load():
            self.load_state(state | {"rng": {}})
            set_rng_state(state["rng"], self.ranks.device)
            if self.ranks.first:
                print(f"resumed from step {self.step}", flush=True)

    def save_near(self, *, last: bool) -> None:
        def own() -> dict[str, Any]:
            return self.state() | {"rng": rng_state(self.ranks.device)}

        self.near.save(self.step, own, last=last)

    def state(self) -> dict[str, Any]:
        return {
            "settings": self.settings(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if state["settings"] != self.settings():
            sys.exit(
                f"{self.options.out} holds a run with {state['settings']}, this one has {self.settings()}: "
                "use the same settings, or another --out"
            )
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        # With another number of ranks the curve is another one anyway; the fresh seeds stay.
        rng = state["rng"]
        if rng and len(rng["torch"]) == self.ranks.world_size:
            # Copies: torch.set_rng_state crashes on a row of a larger tensor.
            own = {name: rows[self.ranks.rank].clone() for name, rows in rng.items()}
            set_rng_state(own, self.ranks.device)

    def settings(self) -> dict[str, Any]:
        """What must not change between the parts of one run."""
        names = ("seed", "batch", "block", "layers", "heads", "width", "lr")
        return {name: getattr(self.options, name) for name in names} | {"text": self.text.checksum}

    def _learning_rate_factor(self, step: int) -> float:
        """A linear warm-up, then a cosine down to a tenth."""
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        progress = min(1.0, (step - WARM_UP_STEPS) / max(1, self.options.steps - WARM_UP_STEPS))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class FlatGradients:
    """All gradients as one tensor, averaged over the ranks by one all-reduce.

    Not DistributedDataParallel: it orders its buckets anew after the first step, so a resumed run would
    add up the same numbers in another order than an undisturbed one, and the loss curves would part.
    Two more numbers ride along for free: the loss, and the wish to stop, on which all ranks must agree
    in the same step, or some would wait forever for the others.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self._size = sum(parameter.numel() for parameter in parameters)
        self._flat = torch.zeros(self._size + 2, device=parameters[0].device)
        offset = 0
        for parameter in parameters:
            parameter.grad = self._flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def zero(self) -> None:
        self._flat.zero_()  # in place: the parameters' gradients must stay views of it

    def average_over_ranks(self, loss: Tensor, want_stop: bool) -> tuple[float, bool]:
        self._flat[self._size] = loss
        self._flat[self._size + 1] = float(want_stop)
        dist.all_reduce(self._flat)
        self._flat /= dist.get_world_size()
        mean_loss, stop = self._flat[self._size :].tolist()
        return mean_loss, stop > 0


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Where the random generators of this process are, as tensors of fixed size."""
    _, words, gauss = random.getstate()
    python = torch.tensor([*words, math.nan if gauss is None else gauss], dtype=torch.float64)
    state = {"torch": torch.get_rng_state(), "python": python}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    *words, gauss = state["python"].tolist()
    version = random.getstate()[0]
    random.setstate((version, tuple(map(int, words)), None if math.isnan(gauss) else gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def parse_options(
    argv: list[str] | None, add_more: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> argparse.Namespace:
    run_dir = os.environ.get("NVRX_RUN_DIR")
    parser = argparse.ArgumentParser(
        description="Train a small character-level GPT on the Python standard library's source.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps in all, those before a restart included")
    add(
        "--out",
        type=Path,
        default=Path(run_dir) / "train" if run_dir else Path("train_gpt_out"),
        help="folder for checkpoints and loss.jsonl; every rank must see it",
    )
    add("--ckpt-every", type=int, default=20, metavar="STEPS", help="steps between checkpoints")
    add(
        "--ckpt",
        choices=["shared", "async", "local", "ladder"],
        default="shared",
        help="shared: rank 0 writes below --out; async: so, while training goes on; local: "
        "each rank in its node's memory, with a copy on another; ladder: so, and every fifth below --out",
    )
    add(
        "--local-dir",
        metavar="DIR",
        default=os.environ.get("NVRX_RAM_DIR"),
        help="folder on the node for --ckpt local and ladder",
    )
    add("--batch", type=int, default=8, help="sequences per rank and step")
    add("--block", type=int, default=64, help="bytes in a sequence")
    add("--layers", type=int, default=3, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads; must divide --width")
    add("--width", type=int, default=96, help="size of the hidden state")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--seed", type=int, default=1, help="decides the first weights, the data order and the dropout")
    add(
        "--step-delay",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="sleep in each step, as a larger model would compute; for demonstrations",
    )
    add(
        "--straggler-interval",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="compare the ranks' pace so often, and say who is slow; 0: never",
    )
    add(
        "--stop-if-straggler",
        action="store_true",
        help="end, with a checkpoint, when a rank is slow for good",
    )
    add("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="auto: nccl where there is a GPU")
    add_more(parser)
    options = parser.parse_args(argv)
    for name in ("steps", "ckpt_every", "batch", "block", "layers", "heads", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.width % options.heads:
        parser.error(f"--heads must divide --width: {options.width} is no multiple of {options.heads}")
    if not 0 <= options.straggler_interval < math.inf:
        parser.error(f"--straggler-interval must not be negative, not {options.straggler_interval}")
    if options.step_delay < 0:
        parser.error(f"--step-delay must not be negative, not {options.step_delay}")
    return options


if __name__ == "__main__":
    main()

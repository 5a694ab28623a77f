"""The training of `train_gpt.py`, restarted in its processes; faults leave no trace in the loss curve.

    nvrx-srun examples/train_inprocess.py                      in a Slurm job
    torchrun --nproc-per-node 2 examples/train_inprocess.py    without Slurm
    … --fault 7:1:exception --fault 12:0:hang                  two faults, on purpose

What `train_gpt.py` has in `main` is here in `train`, which can be called again at any moment: it makes its
process group, model and optimizer itself, and loads the newest checkpoint. Everything that outlives a call,
Python's imports, the CUDA context and the data, costs nothing again.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from gpt.losses import LossFile
from gpt.pace import Pace
from train_gpt import Training, join_process_group, parse_options

from nvrx_slurm.inprocess import CallWrapper, Wrapper
from nvrx_slurm.inprocess.initialize import RetryController

MOST_CALLS = 20
KINDS = ("exception", "hang")


def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv, add_options)
    if options.ckpt != "shared":
        sys.exit(f"--ckpt {options.ckpt}: train_gpt.py has that; this example saves with --ckpt shared")
    wrapper = Wrapper(
        initialize=RetryController(max_iterations=MOST_CALLS),
        soft_timeout=timedelta(seconds=options.soft_timeout),
    )
    wrapper(train)(options)


def train(options: argparse.Namespace, call: CallWrapper) -> None:
    """Train to the last step. The wrapper calls it again after every fault, with another `call.iteration`."""
    # Every call meets in a part of the store of its own: what the last one left there is of no use.
    meeting = dist.PrefixStore(f"train/{call.iteration}", call.store)
    ranks = join_process_group(options.backend, meeting)
    training = Training(options, ranks)
    training.resume()
    pace = Pace(options.straggler_interval, options.stop_if_straggler)
    losses = LossFile(options.out / "loss.jsonl") if ranks.first else None
    stop = False
    try:
        while training.step < options.steps and not stop:
            call.ping()
            for fault in options.fault:
                fault.strike(training.step, ranks.rank)
            loss, _ = training.run_step(pace, want_stop=False)
            stop = pace.end_step()
            if losses:
                losses.append(training.step, loss)
            if stop or training.step == options.steps or training.step % options.ckpt_every == 0:
                training.save()
    finally:
        pace.close()
        if losses:
            losses.close()
    if ranks.first:
        print(f"finished at step {training.step}/{options.steps} in call {call.iteration + 1}", flush=True)
    dist.destroy_process_group()


@dataclass
class Fault:
    """One rank fails before one step; once, though the step is done again."""

    step: int
    rank: int
    kind: str
    is_over: bool = False

    @classmethod
    def parse(cls, text: str) -> "Fault":
        step, rank, kind = text.split(":")
        if kind not in KINDS:
            raise ValueError(kind)
        return cls(int(step), int(rank), kind)

    def strike(self, step: int, rank: int) -> None:
        if self.is_over or (step, rank) != (self.step, self.rank):
            return
        self.is_over = True
        print(f"on purpose, before step {step}: {self.kind}", flush=True)
        if self.kind == "exception":
            raise RuntimeError(f"a fault on purpose before step {step}")
        while True:
            time.sleep(0.01)  # without a ping: after soft_timeout the wrapper takes it for hung


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fault",
        action="append",
        type=Fault.parse,
        default=[],
        metavar="STEP:RANK:KIND",
        help=f"fail on purpose, by {' or '.join(KINDS)}; may be repeated",
    )
    parser.add_argument(
        "--soft-timeout", type=float, default=60.0, help="seconds without a step that count as a hang"
    )


if __name__ == "__main__":
    main()

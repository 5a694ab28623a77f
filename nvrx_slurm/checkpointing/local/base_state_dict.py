"""How a training state is taken apart into tensors and the rest, so that each can travel in its own way."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.ids import CkptID, HeldPart

_safe_types: list[type] = [CkptID, HeldPart]


class TensorAwareStateDict(ABC):
    """A state whose tensors can be taken out and put back.

    Order is all that tells tensors apart: ``tensors``, ``pop_tensors`` and ``insert_tensors`` must go through
    them in the same order on every rank, and after the object was sent to another.

    Without its tensors the object is *hollow*. What is left must be small, and is pickled. It is read back by
    torch's ``weights_only`` rules: plain values and containers, and subclasses of this class that the reading
    process has imported. Other types in it must be named by ``torch.serialization.add_safe_globals``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _safe_types.append(cls)

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out and return them; an error if they are out already."""

    @property
    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, one after the other; an error if they are out."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors are out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put back what ``pop_tensors`` has returned, or tensors of the same shapes and types."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put in uninitialized tensors of the shapes and types that belong there."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies in host memory; where they were is remembered."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors to the kind of device that they were on."""

    def values(self) -> Iterable[Any]:
        """The values of this object's attributes."""
        return self.__dict__.values()


def trust(cls: type) -> type:
    """Let instances of ``cls`` stand in a hollow state dict; a class decorator."""
    _safe_types.append(cls)
    return cls


def encode(obj: object) -> bytes:
    """Return ``obj`` as bytes that :func:`decode` reads.

    Raises:
        CheckpointingException: something in it would be refused when it is read; names what.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
    except Exception as error:  # pickle lets through whatever an object's own methods raise
        raise CheckpointingException(f"The state can't be pickled without its tensors: {error}") from error
    data = buffer.getvalue()
    decode(data)
    return data


def decode(data: bytes) -> Any:
    """Return what :func:`encode` was given. Runs no code that ``data`` names, but of trusted types.

    Raises:
        CheckpointingException: it holds something else, or is damaged.
    """
    with torch.serialization.safe_globals(list(_safe_types)):
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # UnpicklingError, but also whatever a damaged pickle runs into
            lines = [line.strip() for line in str(error).splitlines() if "Unsupported" in line]
            raise CheckpointingException(
                "The state without its tensors can't be read back safely. Name other types in it by "
                f"torch.serialization.add_safe_globals: {(lines or [str(error)])[0]:.300}"
            ) from error

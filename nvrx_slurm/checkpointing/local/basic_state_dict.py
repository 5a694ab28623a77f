"""The state dict of a model, an optimizer or a whole training as a :class:`TensorAwareStateDict`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict, trust
from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.shards import ShardSpec, local_of, shard_of


@trust
@dataclass(frozen=True)
class TensorPlaceholder:
    """Stands where a tensor was."""

    device: torch.device
    shape: torch.Size
    dtype: torch.dtype
    shard: ShardSpec | None = None
    """Of a DTensor: of what this rank's tensor is a shard."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorPlaceholder:
        local = local_of(tensor)
        return cls(local.device, local.shape, local.dtype, shard_of(tensor))

    def init_data(self) -> torch.Tensor:
        """Return an uninitialized tensor on the current device of the kind that the old one was on."""
        local = torch.empty(self.shape, dtype=self.dtype, device=self.device.type)
        return local if self.shard is None else self.shard.assemble(local)

    def restore(self, local: torch.Tensor) -> torch.Tensor:
        """Return ``local`` as what stood here."""
        if (local.shape, local.dtype) != (self.shape, self.dtype):
            raise CheckpointingException(
                f"A tensor of {tuple(local.shape)} {local.dtype} is to go where one of {tuple(self.shape)} "
                f"{self.dtype} was."
            )
        return local if self.shard is None else self.shard.assemble(local)


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """Tensors on any device, DTensors among them, in nested dicts, lists and tuples.

    The containers are copied, so the caller's own keep their tensors, whatever is done with this object.
    """

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        """
        Raises:
            CheckpointingException: a tensor can't be saved: sparse, quantized, on the meta device, or of a
                subclass other than DTensor; says which.
        """
        self._tree = map_leaves(state_dict, _checked, ())
        self._devices: list[str] | None = None

    @property
    def state_dict(self) -> Any:
        """The content, as it was given."""
        return self._tree

    @property
    def is_hollow(self) -> bool:
        return any(isinstance(leaf, TensorPlaceholder) for leaf in nested_values(self._tree))

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors; of a DTensor this rank's shard."""
        self._require_full("tensors")
        return (local_of(leaf) for leaf in nested_values(self._tree) if isinstance(leaf, torch.Tensor))

    def pop_tensors(self) -> list[torch.Tensor]:
        tensors = list(self.tensors)
        self._map_tensors(TensorPlaceholder.of)
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        rest = iter(tensor_data)

        def fill(placeholder: TensorPlaceholder) -> torch.Tensor:
            try:
                return placeholder.restore(next(rest))
            except StopIteration:
                raise CheckpointingException("There are fewer tensors than places for them.") from None

        places = [leaf for leaf in nested_values(self._tree) if isinstance(leaf, TensorPlaceholder)]
        self._devices = [place.device.type for place in places]
        self._map_placeholders(fill)
        if next(rest, None) is not None:
            raise CheckpointingException("There are more tensors than places for them.")

    def init_tensors(self) -> None:
        self._map_placeholders(TensorPlaceholder.init_data)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._require_full("copy_tensors_to_cpu")
        self._devices = [tensor.device.type for tensor in self.tensors]
        self._map_tensors(lambda tensor: local_of(tensor).to("cpu", non_blocking=non_blocking, copy=True))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move each tensor to the kind of device that it was on, there to the current one.

        Raises:
            RuntimeError: torch has no such device here.
        """
        self._require_full("restore_tensor_device")
        devices = iter(self._devices or [])

        def move(tensor: torch.Tensor) -> torch.Tensor:
            device = next(devices, tensor.device.type)
            return tensor if tensor.device.type == device else tensor.to(device, non_blocking=non_blocking)

        self._map_tensors(move)

    def _require_full(self, call: str) -> None:
        if self.is_hollow:
            raise CheckpointingException(f"{call} needs the tensors, which have been taken out.")

    def _map_tensors(self, change: Callable[[torch.Tensor], Any]) -> None:
        self._tree = map_leaves(
            self._tree, lambda leaf, _: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, ()
        )

    def _map_placeholders(self, change: Callable[[TensorPlaceholder], torch.Tensor]) -> None:
        if any(isinstance(leaf, torch.Tensor) for leaf in nested_values(self._tree)):
            raise CheckpointingException("The tensors have not been taken out.")
        self._tree = map_leaves(
            self._tree, lambda leaf, _: change(leaf) if isinstance(leaf, TensorPlaceholder) else leaf, ()
        )


Path = tuple[Any, ...]


def leaves_by_path(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is in nested dicts, lists and tuples, in order, with its keys and indices."""
    match tree:
        case Mapping():
            for key, value in tree.items():
                yield from leaves_by_path(value, (*path, key))
        case list() | tuple() if not isinstance(tree, torch.Size):
            for index, value in enumerate(tree):
                yield from leaves_by_path(value, (*path, index))
        case _:
            yield path, tree


def nested_values(tree: Any) -> Iterator[Any]:
    """Yield what is in nested dicts, lists and tuples, in order."""
    return (leaf for _, leaf in leaves_by_path(tree))


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace what is in nested dicts and lists by what ``f`` makes of it; return the outermost."""
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


def map_leaves(tree: Any, change: Callable[[Any, Path], Any], path: Path) -> Any:
    """Return new containers with each leaf changed."""
    match tree:
        case Mapping():
            items = ((key, map_leaves(value, change, (*path, key))) for key, value in tree.items())
            return OrderedDict(items) if isinstance(tree, OrderedDict) else dict(items)
        case list() | tuple() if not isinstance(tree, torch.Size):
            values = [map_leaves(value, change, (*path, index)) for index, value in enumerate(tree)]
            if isinstance(tree, list):
                return values
            return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
        case _:
            return change(tree, path)


def _checked(leaf: Any, path: Path) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach()
    local = local_of(tensor)
    why = None
    if type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        why = f"is a {type(local).__name__}: only plain tensors and DTensors can be saved"
    elif local.layout != torch.strided:
        why = f"is {local.layout}: make it dense first"
    elif local.is_quantized:
        why = f"is quantized ({local.dtype}): save its int_repr and scales instead"
    elif local.device.type == "meta":
        why = "is on the meta device: it has no content"
    if why:
        raise CheckpointingException(f"The tensor {'.'.join(map(str, path))} {why}.")
    return tensor

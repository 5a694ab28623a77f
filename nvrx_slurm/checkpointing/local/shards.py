"""What a rank's shard of a DTensor is a shard of, without the process groups that a DTensor holds on to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nvrx_slurm.checkpointing.local.base_state_dict import trust
from nvrx_slurm.checkpointing.local.errors import CheckpointingException

Nested = list[Any]


@trust
@dataclass(frozen=True)
class ShardSpec:
    """Where a shard belongs, and on which mesh of ranks."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    stride: tuple[int, ...]
    offset: tuple[int, ...]
    """Of the shard in the whole tensor."""
    placements: tuple[int | None, ...]
    """By dimension of the mesh: the dimension of the tensor that is sharded, or None: replicated."""
    device_type: str
    mesh: tuple[Any, ...]
    """Nested, the global ranks."""
    dim_names: tuple[str, ...] | None

    def assemble(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor that ``local`` is this rank's shard of.

        All ranks of the job must do so in the same order if the mesh is not the whole job: it is made anew.
        """
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in self.placements]
        result: torch.Tensor = DTensor.from_local(
            local,
            _mesh_of(self),
            placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )
        return result


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, and any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: torch.Tensor = tensor.to_local()
    return local


def shard_of(tensor: torch.Tensor) -> ShardSpec | None:
    """Return what ``tensor`` is a shard of; None: it is no DTensor.

    Raises:
        CheckpointingException: a placement other than shards and replicas, partial sums for instance.
    """
    if not isinstance(tensor, DTensor):
        return None
    placements: list[int | None] = []
    for placement in tensor.placements:
        if type(placement) is Shard:
            placements.append(placement.dim)
        elif type(placement) is Replicate:
            placements.append(None)
        else:
            raise CheckpointingException(
                f"A DTensor has placements {tensor.placements}: Shard and Replicate can be saved."
            )
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return ShardSpec(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tuple(offset),
        tuple(placements),
        mesh.device_type,
        _tuples(mesh.mesh.tolist()),
        tuple(mesh.mesh_dim_names) if mesh.mesh_dim_names else None,
    )


_meshes: dict[tuple[Any, ...], tuple[Any, DeviceMesh]] = {}
"""Made here, with the world that they belong to: after another init_process_group they are of no use."""


def _mesh_of(spec: ShardSpec) -> DeviceMesh:
    key = (spec.device_type, spec.mesh, spec.dim_names)
    world, mesh = _meshes.get(key, (None, None))
    if mesh is None or world is not dist.group.WORLD:
        mesh = DeviceMesh(spec.device_type, torch.tensor(spec.mesh), mesh_dim_names=spec.dim_names)
        _meshes[key] = (dist.group.WORLD, mesh)
    return mesh


def _tuples(nested: Nested | int) -> Any:
    return tuple(map(_tuples, nested)) if isinstance(nested, list) else nested

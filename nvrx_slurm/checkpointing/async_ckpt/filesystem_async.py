"""Checkpoints of torch.distributed.checkpoint, written in the background.

The directory is one that ``torch.distributed.checkpoint.load`` reads. Data files get their names when they
are whole and on disk; ``.metadata``, without which there is no checkpoint, comes last.
"""

from __future__ import annotations

import dataclasses
import heapq
import io
import os
import pickle
import queue
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nvrx_slurm.checkpointing.async_ckpt.file_writes import FileWrites
from nvrx_slurm.checkpointing.async_ckpt.roll_forward import pieces_of
from nvrx_slurm.checkpointing.storage import manifest, pending
from nvrx_slurm.checkpointing.storage.bundle import Bundle
from nvrx_slurm.checkpointing.storage.durable import make_directory
from nvrx_slurm.checkpointing.storage.folders import folder_at
from nvrx_slurm.checkpointing.storage.layout import FileImage, Literal, lay_out
from nvrx_slurm.checkpointing.storage.objects import is_url
from nvrx_slurm.checkpointing.storage.pending import SaveId
from nvrx_slurm.checkpointing.storage.torch_internals import require

_wrap_exception = require("torch.distributed.checkpoint.api", "_wrap_exception")
CURRENT_DCP_VERSION, _StorageInfo, _StoragePrefix = require(
    "torch.distributed.checkpoint.filesystem", "CURRENT_DCP_VERSION", "_StorageInfo", "_StoragePrefix"
)


class WriteResultsQueue(queue.SimpleQueue[Any]):
    """Stays empty: what is written is known before. For programs that shut NVIDIA's down."""

    class _Manager:
        def shutdown(self) -> None:
            """Do nothing: there is no process."""

    def __init__(self) -> None:
        super().__init__()
        self._manager = self._Manager()


_results_queue: WriteResultsQueue | None = None


def get_write_results_queue(mp_mode: str = "spawn") -> WriteResultsQueue:
    """Return the queue of this process; ``mp_mode`` is without effect, for no process is started."""
    del mp_mode
    global _results_queue
    if _results_queue is None:
        _results_queue = WriteResultsQueue()
    return _results_queue


_get_write_results_queue = get_write_results_queue


class FileSystemWriterAsync(FileSystemWriter):  # type: ignore[misc]
    """A storage writer for :func:`~.state_dict_saver.save_state_dict_async_plan`; one for each save."""

    can_run_decentralized_global_plan = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            path: of the checkpoint, a directory that all ranks see, or a URL of one for fsspec.
            args, kwargs: as torch's ``FileSystemWriter``; ``thread_count`` is the number of files that
                are written at a time. With ``sync_files=False`` data files are not waited for: a crash of the
                whole machine may cost a checkpoint that was committed, which a load then says.
            separation_hint: tensors whose name begins with it go to files of their own.
            is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors: without effect; the
                worker writes with threads, and snapshots are always in memory that is used again.

        Raises:
            NotImplementedError: MSC, transforms, other formats than torch.save's, a file per tensor.
            ValueError: a separation hint with fewer than two threads.
        """
        del is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors
        super().__init__(path, *args, **kwargs)
        self._turn_to(path)
        if use_msc:
            raise NotImplementedError("use_msc: NVIDIA's multi-storage client is not supported")
        if not self.single_file_per_rank:
            raise NotImplementedError("single_file_per_rank=False is not supported")
        if self.transforms.extensions:
            raise NotImplementedError("stream extensions are not supported")
        if self.serialization_format != SerializationFormat.TORCH_SAVE:
            raise NotImplementedError(f"{self.serialization_format} is not supported, TORCH_SAVE is")
        if separation_hint is not None and self.thread_count < 2:
            raise ValueError(f"separation_hint needs a thread_count of at least 2, not {self.thread_count}")
        self._separation_hint = separation_hint
        self._writes: FileWrites | None = None
        self._results: list[_Written] = []
        self._failure: BaseException | None = None
        self._save: SaveId | None = None
        self._metadata: Any = None
        self._sequence = 0

    def _turn_to(self, path: str | os.PathLike[str]) -> None:
        self.folder: Path | str = os.fspath(path) if is_url(path) else Path(path)
        self.path = self.folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, into another directory if one is named."""
        super().reset()
        if checkpoint_id:
            self._turn_to(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL, that this writer may be asked for."""
        return is_url(checkpoint_id) or bool(super().validate_checkpoint_id(checkpoint_id))

    def prepare_local_plan(self, plan: Any) -> Any:
        """Make the directory."""
        if isinstance(self.folder, Path):
            make_directory(self.folder)
        if manifest.is_committed(self.folder) and not self.overwrite:
            raise RuntimeError(f"{self.folder} holds a checkpoint, and overwrite is False")
        return plan

    def prepare_decentralized_global_plan(self, plan: Any) -> Any:
        """Name this rank's files as the coordinator would."""
        return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))

    def announce(self, save: SaveId, metadata: Any) -> None:
        """Say which save this is, before its files are laid out: it can be committed without its ranks then.

        Args:
            metadata: on the coordinator, else None. Unchanged from save to save it is pickled only once.
        """
        if isinstance(self.folder, Path):
            self._save, self._metadata = save, metadata

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Lay this rank's files out. What goes wrong is an error of the save, for all ranks."""
        try:
            self._writes = self._lay_out(plan, planner)
        except Exception as error:
            self._failure = error
            self._writes = _failing(error)

    def _lay_out(self, plan: Any, planner: Any) -> FileWrites | None:
        files: list[tuple[Path | str, object]] = []
        buckets = list(self._buckets(plan.items))
        names = [f"{group}{plan.storage_data.prefix}{n}" for n, (group, _) in enumerate(buckets)]
        generation = f".{secrets.token_hex(4)}" if self._is_taken(names) else ""
        _saved_to.append(self.folder)
        for (_, items), unique in zip(buckets, names, strict=True):
            name = f"{unique}{generation}{manifest.DATA_SUFFIX}"
            bundle = Bundle()
            written = [_add(bundle, item, planner.resolve_data(item), name) for item in items]
            self._results += [_Written(**vars(each), mark=bundle.mark) for each in written]
            image = dataclasses.replace(bundle.image(self._note(written)), sync=self.sync_files)
            files.append((folder_at(self.folder).where(name), image))
        if self._save is not None and self._metadata is not None:
            files.append(self._plan(self._save))
        return FileWrites(files, when_failed=self._note_failure) if files else None

    def _is_taken(self, names: list[str]) -> bool:
        """Whether these names may be those of another save, which stays until this one is committed.

        One that is still written, too, or that nobody has committed yet.
        """
        if self.folder in _saved_to or manifest.is_committed(self.folder):
            return True
        there = folder_at(self.folder)
        return self._save is not None and any(there.info(n + manifest.DATA_SUFFIX) for n in names)

    def _note(self, written: list[WriteResult]) -> bytes:
        if self._save is None:
            return b""
        places = pickle.dumps([(each.index, each.storage_data) for each in written])
        return pending.encode_note(pending.Note(self._save, len(written), places))

    def _plan(self, save: SaveId) -> tuple[Path | str, FileImage]:
        self._sequence = _next_sequence(Path(self.folder), save.session)
        pickled, pieces = _pickled(self._metadata)
        name, content = pending.encode_plan(pending.Plan(save, self._sequence, pieces, pickled))
        image = FileImage(len(content), (Literal(0, content),), (), None)
        return folder_at(self.folder).where(name), image

    def _buckets(self, items: list[Any]) -> Iterable[tuple[str, list[Any]]]:
        hint = self._separation_hint
        if hint is None:
            return [("", bucket) for bucket in split_evenly(items, self.thread_count)]
        hinted = [item for item in items if item.index.fqn.startswith(hint)]
        others = [item for item in items if not item.index.fqn.startswith(hint)]
        bins = self.thread_count // 2
        return [("", b) for b in split_evenly(others, bins)] + [(hint, b) for b in split_evenly(hinted, bins)]

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """Return ``async_fn``, ``preload_fn``, ``async_fn_args`` of a request, None if nothing is to do."""
        if self._writes is None:
            return None, None, []
        return self._writes, None, [self.rank, None, None]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Not for this writer.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("save with save_state_dict_async_plan, or with torch's FileSystemWriter")

    def retrieve_write_results(self) -> list[_Written] | tuple[BaseException, Any]:
        """Return what this rank has written, or what went wrong as torch passes it between ranks."""
        if self._failure is not None:
            return _wrap_exception(RuntimeError(f"Worker failure: {self._failure}"))  # type: ignore[no-any-return]
        return self._results

    def _note_failure(self, error: BaseException) -> None:
        self._failure = error

    def finish(self, metadata: Any, results: list[list[_Written]]) -> None:
        """Commit the checkpoint: on the coordinator, when all ranks have written."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {each.index: each.storage_data for rank in results for each in rank}
        metadata.storage_meta = self.storage_meta()
        marks = {each.storage_data.relative_path: each.mark for rank in results for each in rank}
        manifest.commit(self.folder, pickle.dumps(metadata), marks, self._save, self._sequence)


@dataclasses.dataclass(frozen=True)
class _Written(WriteResult):  # type: ignore[misc]
    mark: str
    """Of the file that it is in."""


_saved_to: deque[Path | str] = deque(maxlen=64)
"""Where the last saves go, of which some may be written still."""
_sequences: dict[Path, tuple[str, int]] = {}
"""Of the last save into a directory, with its session."""
_last_pickled: tuple[Any, bytes, int] = (None, b"", 0)


def _next_sequence(folder: Path, session: str) -> int:
    """Count the saves into a directory, on from what is there: before this session another process saved."""
    last_session, last = _sequences.get(folder.absolute(), ("", 0))
    number = last + 1
    if session != last_session:
        number = max(number, manifest.next_sequence(folder))
    _sequences[folder.absolute()] = session, number
    return number


def _pickled(metadata: Any) -> tuple[bytes, int]:
    """Return metadata as bytes, and of how many pieces it tells."""
    global _last_pickled
    if _last_pickled[0] is not metadata:
        _last_pickled = metadata, pickle.dumps(metadata), len(pieces_of(metadata))
    return _last_pickled[1:]


def split_evenly(items: list[Any], bins: int) -> list[list[Any]]:
    """Split items so that each bin gets about as many bytes; bins that would be empty are left out."""
    if bins == 1:
        return [items] if items else []
    buckets: list[list[Any]] = [[] for _ in range(bins)]
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for number, item in enumerate(objects):
        buckets[number % bins].append(item)
    heap = [(0, number) for number in range(bins)]
    for item in sorted(tensors, key=lambda item: item.tensor_storage_size(), reverse=True):
        size, number = heapq.heappop(heap)
        buckets[number].append(item)
        heapq.heappush(heap, (size + item.tensor_storage_size(), number))
    return [bucket for bucket in buckets if bucket]


def _add(bundle: Bundle, item: Any, data: Any, name: str) -> WriteResult:
    if isinstance(data, io.BytesIO):
        place = bundle.add_bytes(data.getvalue())
    else:
        _refuse_what_can_not_be_loaded(item.index.fqn, data)
        place = bundle.add_image(_image_of(data.detach()))
    info = _StorageInfo(name, place.offset, place.length)
    return WriteResult(index=item.index, size_in_bytes=place.length, storage_data=info)


def _refuse_what_can_not_be_loaded(name: str, tensor: Any) -> None:
    """Else ``torch.distributed.checkpoint.load`` would fail, or find something else, when it is too late."""
    if tensor.device.type == "meta":
        raise TypeError(f"{name}: a tensor on the meta device has no content that could be saved")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else "sparse"
        raise TypeError(f"{name}: torch.distributed.checkpoint can't load {kind} tensors")
    known = (torch.Tensor, torch.nn.Parameter, *torch.serialization.get_safe_globals())
    if type(tensor) not in known:
        raise TypeError(
            f"{name}: torch.distributed.checkpoint loads no {type(tensor).__name__}, unless it is one of "
            "torch.serialization.add_safe_globals"
        )


def _image_of(tensor: Any) -> FileImage:
    if type(tensor) is not torch.Tensor:
        return lay_out(tensor, with_table=False)
    size = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() != size or not tensor.is_contiguous():
        # torch.save would write all of the storage that it views
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if not size or tensor.is_conj() or tensor.is_neg():
        return lay_out(tensor, with_table=False)
    kind = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
    if kind not in _templates:
        _templates[kind] = _filled(lay_out(tensor, with_table=False), None, ())
    return _filled(_templates[kind], tensor.untyped_storage(), (tensor,))


_templates: dict[tuple[Any, ...], FileImage] = {}
"""Files of contiguous tensors, by what makes them differ: to pickle is dear where there are many tensors."""


def _filled(image: FileImage, storage: Any, tensors: tuple[Any, ...]) -> FileImage:
    (hole,) = image.holes
    return dataclasses.replace(image, holes=(dataclasses.replace(hole, storage=storage),), tensors=tensors)


def _failing(error: Exception) -> FileWrites:
    class Failing(FileWrites):
        def images(self) -> list[tuple[Path | str, FileImage]]:
            raise error

    return Failing([], when_failed=lambda _error: None)

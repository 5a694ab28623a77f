"""What to write, as the function of an :class:`AsyncRequest`: files that have been laid out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nvrx_slurm.checkpointing.storage.layout import FileImage, lay_out
from nvrx_slurm.checkpointing.storage.torch_file import write_file


class FileWrites:
    """Objects, or files that have been laid out already, and their paths.

    The queue snapshots the tensors straight into the files' images and has a worker write those. Called
    directly, it writes the files at once, from the tensors as they are.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path | str, object]],
        when_failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """
        Args:
            files: each with its path or URL.
            when_failed: told of what goes wrong in a direct call, which then raises nothing: for whoever
                tells other ranks.
        """
        self._files = tuple(files)
        self._when_failed = when_failed

    def images(self) -> list[tuple[Path | str, FileImage]]:
        """Lay out what is not yet.

        Raises:
            Exception: what pickle says about an object that can't be pickled.
        """
        return [
            (path, content if isinstance(content, FileImage) else lay_out(content))
            for path, content in self._files
        ]

    def __call__(self, *_arguments: object, **_keywords: object) -> None:
        try:
            for path, image in self.images():
                write_file(path, image)
        except Exception as error:
            if self._when_failed is None:
                raise
            self._when_failed(error)

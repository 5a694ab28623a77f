"""The ``srun`` process that carries the agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence

_TERM_GRACE_S = 2.0
_LAST_WORDS_S = 1.0
# Said by every srun with --cpu-bind=none where the site binds nothing anyway.
_NOISE = "cluster configuration lacks support for cpu binding"


class AgentsStep:
    """Starts srun in a session of its own, passes on what it says, and tells when it has ended."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._argv = argv
        self._environ = environ
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._last_words: deque[str] = deque(maxlen=5)

    async def start(self) -> None:
        """Start srun.

        Raises:
            OSError: srun is not there or can't be executed.
        """
        # Its own session: a Ctrl-C is for the Coordinator, which then stops the step in good order.
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            env=dict(self._environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            self._reading.append(asyncio.create_task(self._relay(stream)))

    async def _relay(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # longer than the reader's limit; the rest of it comes as the next line
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if _NOISE in text:
                continue
            self._last_words.append(text)
            self._say(text)

    async def wait(self) -> str:
        """Wait for the end of srun; return what it was, for people."""
        assert self._process is not None
        code = await self._process.wait()
        # Agents that have outlived it hold its output open.
        await asyncio.wait(self._reading, timeout=_LAST_WORDS_S)
        words = f": {' / '.join(self._last_words)}" if self._last_words else ""
        return f"srun ended with {code}{words}"

    def kill(self) -> None:
        """End srun at once, and the helper of its own that would end the step on all nodes then."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> None:
        """Give srun ``grace_s`` seconds to end by itself, then end it: it waits for lost nodes otherwise."""
        if self._process is None:
            return
        for sig, patience in ((None, grace_s), (signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, None)):
            if sig is signal.SIGTERM:
                self._say("srun still waits for nodes that are gone: ending it")
            if sig is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, sig)
            try:
                await asyncio.wait_for(self._process.wait(), patience)
                return
            except asyncio.TimeoutError:
                continue

"""The key-value store of the hub: what rank assignments and users exchange; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvrx_slurm.supervisor.messages import StoreReply, StoreRequest

Answer = Callable[[StoreReply], None]


@dataclass(frozen=True, eq=False)
class _Waiting:
    missing: set[str]
    answer: Answer
    asker: object


class HubStore:
    """Answers requests; one that waits is answered when its keys are there."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Waiting]] = {}

    def handle(self, request: StoreRequest, answer: Answer, asker: object = None) -> None:
        """Carry out ``request``; ``answer`` is called once, now or when the keys are there.

        ``asker`` is who asks, for :meth:`forget`.
        """
        values, keys = self._values, request.keys
        match request.operation:
            case "wait":
                self._wait(keys, answer, asker)
            case "set":
                for key, value in zip(keys, request.values, strict=False):
                    self._put(key, value)
                answer(StoreReply())
            case "get":
                lacking = [key for key in keys if key not in values]
                if lacking:
                    answer(StoreReply(error=f"no key {lacking[0]!r}"))
                else:
                    answer(StoreReply(tuple(values[key] for key in keys)))
            case "add":
                self._add(keys[0], request.amount, answer)
            case "append":
                for key, value in zip(keys, request.values, strict=False):
                    self._put(key, values.get(key, b"") + value)
                answer(StoreReply())
            case "compare_set":
                expected, desired = request.values
                now = values.get(keys[0])
                if now == expected or (now is None and not expected):
                    self._put(keys[0], desired)
                answer(StoreReply((values.get(keys[0], expected),)))
            case "check":
                answer(StoreReply(number=int(all(key in values for key in keys))))
            case "delete":
                answer(StoreReply(number=sum(values.pop(key, None) is not None for key in keys)))
            case "delete_prefix":
                old = [key for key in values if key.startswith(keys)]
                for key in old:
                    del values[key]
                answer(StoreReply(number=len(old)))
            case "count":
                answer(StoreReply(number=len(values)))
            case "keys":
                answer(StoreReply(tuple(key.encode() for key in values)))
            case unknown:
                answer(StoreReply(error=f"no operation {unknown!r}"))

    def forget(self, asker: object) -> None:
        """Nobody is there any more to hear what ``asker`` waits for."""
        for key in list(self._waiting):
            self._waiting[key] = [waiting for waiting in self._waiting[key] if waiting.asker is not asker]
            if not self._waiting[key]:
                del self._waiting[key]

    def _add(self, key: str, amount: int, answer: Answer) -> None:
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            answer(StoreReply(error=f"key {key!r} holds no number"))
            return
        if not -(2**63) <= total < 2**63:
            answer(StoreReply(error=f"key {key!r} would be {total}: a number of 64 bits is accepted"))
            return
        self._put(key, str(total).encode())
        answer(StoreReply(number=total))

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            waiting.missing.discard(key)
            if not waiting.missing:
                waiting.answer(StoreReply())

    def _wait(self, keys: tuple[str, ...], answer: Answer, asker: object) -> None:
        missing = {key for key in keys if key not in self._values}
        if not missing:
            answer(StoreReply())
            return
        waiting = _Waiting(missing, answer, asker)
        for key in missing:
            self._waiting.setdefault(key, []).append(waiting)

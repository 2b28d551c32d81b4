"""A black box on a Ray cluster: actors that each hold a copy of it, called in parallel and started again by Ray (extra `scale`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

import numpy as np
import ray

Function = Callable[..., Any]


class _Copy:
    """What an actor holds."""

    def __init__(self, make: Callable[[], Function]) -> None:
        self._function = make()

    def call(self, *arrays: Any) -> Any:
        return self._function(*[np.array(a) if isinstance(a, np.ndarray) else a for a in arrays])  # Ray's own can't be written to


class RayPool:
    """Each call goes to an actor that has nothing else to do.

    make      called once in each actor, and again when it is restarted: opens the file, the session, the connection
    actors    how many there are, and how many calls run at a time
    restarts  how often Ray may start each of them again; a call that was lost with its actor is made again
    timeout   seconds that a call may take; after that its actor is ended and started again, and the call fails
    options   for Ray, such as {"num_cpus": 1} or {"resources": {"board": 1}}
    """

    def __init__(
        self, make: Callable[[], Function], actors: int, *, restarts: int, timeout: float | None, options: Mapping[str, Any]
    ) -> None:
        if not ray.is_initialized():
            ray.init()
        kind = ray.remote(_Copy).options(max_restarts=restarts, max_task_retries=restarts, **options)
        self.actors, self._timeout = [kind.remote(make) for _ in range(actors)], timeout
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for actor in self.actors:
            self._idle.put(actor)

    def __call__(self, *arrays: Any) -> Any:
        actor = self._idle.get()
        try:
            return ray.get(actor.call.remote(*arrays), timeout=self._timeout)
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor, no_restart=False)
            raise TimeoutError(f"no answer within {self._timeout:g} seconds; the actor is started again") from None
        except ray.exceptions.RayTaskError as failed:
            raise failed.cause from None  # what the box itself has raised
        finally:
            self._idle.put(actor)

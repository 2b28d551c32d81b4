"""A black box on a Ray cluster: actors that each hold a copy of it, called in parallel and started again by Ray (extra `scale`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
import ray

Function = Callable[..., Any]


class _Copy:
    """What an actor holds."""

    def __init__(self, make: Callable[[], Function]) -> None:
        self._function = make()

    @ray.method(max_task_retries=-1)
    def start(self) -> None:
        """Nothing: whoever waits for it waits until the actor is there, again."""

    def call(self, *arrays: Any) -> Any:
        return self._function(*[np.array(a) if isinstance(a, np.ndarray) else a for a in arrays])  # Ray's own can't be written to


class RayPool:
    """Each call goes to an actor that has nothing else to do.

    make      called once in each actor, and again when it is restarted: opens the file, the session, the connection
    actors    how many there are, and how many calls run at a time
    restarts  how often a call is made again whose actor died. The actor itself is started again each time: else a record that ends
              it would use up what the others need
    timeout   seconds that a call may take, once its actor has started; then that is ended and started again, and the call fails
    options   for Ray, such as {"num_cpus": 1} or {"resources": {"board": 1}}
    """

    def __init__(
        self, make: Callable[[], Function], actors: int, *, restarts: int, timeout: float | None, options: Mapping[str, Any]
    ) -> None:
        if not ray.is_initialized():
            ray.init()
        kind = ray.remote(_Copy).options(max_restarts=-1, **options)
        self.actors, self._timeout, self._tries = [kind.remote(make) for _ in range(actors)], timeout, 1 + restarts
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for actor in self.actors:
            self._idle.put((actor, False))

    def __call__(self, *arrays: Any) -> Any:
        for attempt in range(self._tries):
            with suppress(ray.exceptions.RayActorError) if attempt + 1 < self._tries else nullcontext():
                return self._tried(*arrays)
        raise AssertionError("unreachable")

    def _tried(self, *arrays: Any) -> Any:
        actor, started = self._idle.get()
        try:
            if not started:
                ray.get(actor.start.remote())
            started = False
            found = ray.get(actor.call.remote(*arrays), timeout=self._timeout)
            started = True
            return found
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor, no_restart=False)
            raise TimeoutError(f"no answer within {self._timeout:g} seconds; the actor is started again") from None
        except ray.exceptions.RayTaskError as failed:
            started = True
            raise failed.cause from None  # what the box itself has raised
        finally:
            self._idle.put((actor, started))

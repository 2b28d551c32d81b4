"""`BlackBox`: anything that maps arrays to arrays, record by record, as a module without parameters.

ONNX Runtime, scikit-learn, numpy, another process, a service: only its values are needed, so it may stand in the middle of a model,
at its end, in both places, or be the loss function. It sees what the layers in front of it make of private records, in the clear
(docs/pitfalls.md).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpulr import validate
from dpulr.errors import ENDING, BlackBoxError, BlackBoxTimeout, InvalidArgument

_ARRAYS = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(bool)": np.bool_,
}


class BlackBox(nn.Module):
    """`function(*arrays)` takes arrays with a row per record and returns one with a row per record, of `output_shape` each.

    name         what messages call it
    dtype        of what it returns here; by default that of its first input of floats
    tensors      hand it tensors instead of numpy arrays
    batch_size   at most so many records per call; `pad` fills the last call up to just so many, with copies of its last record
    random       it gives other values on each call; then it gets one record at a time, because what it mixes can't be tried
    concurrency  so many calls at a time, by threads
    timeout      seconds that a call may take; one that takes longer is left behind
    retries      how often a call is tried again after an error of `retry_on` or a time-out: first after `backoff` seconds, then
                 after twice as many, and so on
    """

    def __init__(
        self,
        function: Callable[..., Any],
        output_shape: Sequence[int],
        *,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        tensors: bool = False,
        batch_size: int | None = None,
        pad: bool = False,
        random: bool = False,
        concurrency: int = 1,
        timeout: float | None = None,
        retries: int = 0,
        backoff: float = 0.5,
        retry_on: tuple[type[Exception], ...] = (OSError, EOFError),
    ) -> None:
        super().__init__()
        if not callable(function):
            raise InvalidArgument(f"a black box is made of something that can be called, not of {type(function).__name__}.")
        for option, value, least in (("batch_size", batch_size, 1), ("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value is not None:
                validate.whole_number(option, value, least)
        if timeout is not None:
            validate.positive("timeout", timeout)
        validate.at_least("backoff", backoff, 0)
        if pad and batch_size is None:
            raise InvalidArgument("pad=True fills calls up to batch_size records: give batch_size, too.")
        if random and batch_size not in (None, 1):
            raise InvalidArgument(f"a random black box gets one record at a time; batch_size is {batch_size}. Leave it out.")
        self.function, self.output_shape, self.dtype = function, torch.Size(output_shape), dtype
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self.tensors, self.pad, self.random = tensors, pad, random
        self.batch_size = 1 if random else batch_size
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.retry_on = (*retry_on, BlackBoxTimeout)
        self._stands_in = False

    @classmethod
    def onnx(cls, model: Any, output_shape: Sequence[int] | None = None, **options: Any) -> BlackBox:
        """A box around the first output of an .onnx file or an `onnxruntime.InferenceSession`; inputs in the order of the file's.

        A batch size that the file fixes is kept to, by padding.
        """
        if isinstance(model, str | Path):
            import onnxruntime

            threads = onnxruntime.SessionOptions()
            threads.intra_op_num_threads = torch.get_num_threads()
            options.setdefault("name", Path(model).name)
            model = onnxruntime.InferenceSession(str(model), threads, providers=onnxruntime.get_available_providers())
        inputs, output = model.get_inputs(), model.get_outputs()[0]
        shape = tuple(output.shape[1:]) if output_shape is None else tuple(output_shape)
        if not all(isinstance(length, int) for length in shape):
            raise InvalidArgument(f"the file does not say how long {output.name!r} is, only {shape}: give output_shape.")
        if isinstance(inputs[0].shape[0], int):
            options = {"batch_size": inputs[0].shape[0], "pad": True, **options}

        def run(*arrays: np.ndarray) -> np.ndarray:
            pairs = zip(inputs, arrays, strict=True)
            found: list[np.ndarray] = model.run(
                [output.name], {i.name: array.astype(_ARRAYS.get(i.type, array.dtype), copy=False) for i, array in pairs}
            )
            return found[0]

        return cls(run, shape, **{"name": output.name, **options})

    @classmethod
    def ray(
        cls,
        make: Callable[[], Callable[..., Any]],
        output_shape: Sequence[int],
        *,
        actors: int,
        restarts: int = 3,
        timeout: float | None = None,
        ray_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> BlackBox:
        """A box that Ray actors hold, each its own, made by `make()` there; `batch_size` says how a batch is dealt out to them.

        An actor that dies is started again, and its call made again, `restarts` times; one that takes longer than `timeout` fails.
        """
        validate.whole_number("actors", actors)
        validate.whole_number("restarts", restarts, 0)
        from dpulr.model.ray_pool import RayPool

        pool = RayPool(make, actors, restarts=restarts, timeout=timeout, options=ray_options or {})
        name = getattr(make, "__name__", type(make).__name__)
        return cls(pool, output_shape, **{"name": name, "concurrency": actors, **options})

    def extra_repr(self) -> str:
        return f"{self.name!r}, output_shape={tuple(self.output_shape)}"

    def __deepcopy__(self, memo: Any) -> BlackBox:
        """It has no parameters and no state; what it calls (a session, a connection) can rarely be copied."""
        return self

    # --- a call -------------------------------------------------------------------------------------------------------
    def forward(self, *inputs: Tensor) -> Tensor:
        if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise BlackBoxError(f"the black box {self.name!r} takes tensors with a row per record.")
        records, floats = inputs[0].shape[0], [tensor.dtype for tensor in inputs if tensor.is_floating_point()]
        dtype = self.dtype or next(iter(floats), torch.get_default_dtype())
        place: dict[str, Any] = {"dtype": dtype, "device": inputs[0].device}
        if records == 0:
            return torch.zeros(0, *self.output_shape, **place)
        given = [self._handed(tensor) for tensor in inputs]
        if self._stands_in:
            self._answer([rows[:1] for rows in given], 1)
            return self._stand_in(inputs[0], **place)
        size = self.batch_size or records
        parts = [([rows[i : i + size] for rows in given], min(size, records - i)) for i in range(0, records, size)]
        if self.concurrency == 1 or len(parts) == 1:
            answers = [self._answer(*part) for part in parts]
        else:
            with ThreadPoolExecutor(min(self.concurrency, len(parts)), thread_name_prefix=self.name) as pool:
                answers = list(pool.map(lambda part: self._answer(*part), parts))
        return torch.cat(answers).to(**place)

    def _handed(self, tensor: Tensor) -> Any:
        """A copy: the box may overwrite it."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.tensors:
            return copy
        return (copy.float() if copy.dtype in (torch.bfloat16, torch.float16) else copy).cpu().numpy()

    def _answer(self, rows: list[Any], records: int) -> Tensor:
        """What the box says of so many records, checked."""
        if self.pad and self.batch_size is not None and records < self.batch_size:
            rows = [self._filled(array, self.batch_size - records) for array in rows]
        expected = len(rows[0])
        found = self._tried(rows)
        try:
            answer = found.detach() if isinstance(found, Tensor) else torch.from_numpy(_plain(np.asarray(found)))
        except (TypeError, ValueError) as problem:
            raise BlackBoxError(f"the black box {self.name!r} returned no array of numbers: {problem}") from problem
        if answer.shape != (expected, *self.output_shape):
            raise BlackBoxError(
                f"the black box {self.name!r} returned shape {tuple(answer.shape)} for {expected} records; expected "
                f"{(expected, *self.output_shape)}, by its output_shape={tuple(self.output_shape)}."
            )
        return answer[:records]

    @staticmethod
    def _filled(rows: Any, more: int) -> Any:
        return torch.cat([rows, *[rows[-1:]] * more]) if isinstance(rows, Tensor) else np.concatenate([rows, *[rows[-1:]] * more])

    def _tried(self, rows: list[Any]) -> Any:
        """Call it; after an error that may pass, wait and call it again."""
        for attempt in range(self.retries + 1):
            try:
                return self._limited(rows)
            except ENDING:
                raise
            except Exception as problem:
                last = attempt == self.retries
                if last and isinstance(problem, BlackBoxTimeout):
                    raise
                if last or not isinstance(problem, self.retry_on):
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    raise BlackBoxError(
                        f"the black box {self.name!r} raised {type(problem).__name__}{tries}: {problem}"
                    ) from problem
            time.sleep(self.backoff * 2**attempt)
        raise AssertionError("unreachable")

    def _limited(self, rows: list[Any]) -> Any:
        """Call it, for as long as it may take. A call that hangs stays in a thread of its own, which ends with the program."""
        if self.timeout is None:
            return self.function(*rows)
        future: Future[Any] = Future()

        def work() -> None:
            try:
                with torch.no_grad():
                    future.set_result(self.function(*rows))
            except BaseException as problem:
                future.set_exception(problem)

        threading.Thread(target=work, daemon=True, name=f"black box {self.name}").start()
        try:
            return future.result(self.timeout)
        except TimeoutError:
            if future.done():
                raise  # it was the box's own
        raise BlackBoxTimeout(f"the black box {self.name!r} has not answered within {self.timeout:g} seconds.")

    # --- while a model is checked -------------------------------------------------------------------------------------
    def _stand_in(self, x: Tensor, **place: Any) -> Tensor:
        """A fixed function of each record, of the right shape."""
        pattern = torch.cos(torch.arange(1, 1 + math.prod(self.output_shape), **place)).view(self.output_shape)
        level = x.reshape(len(x), -1).to(**place).mean(1)
        return level.view(-1, *[1] * len(self.output_shape)) * pattern


@contextmanager
def stand_ins(*parts: Any) -> Iterator[list[BlackBox]]:
    """While it lasts, random boxes give the values of a fixed function, so that the rest of the model can be compared."""
    boxes = [
        box for part in parts if isinstance(part, nn.Module) for box in part.modules() if isinstance(box, BlackBox) and box.random
    ]
    try:
        for box in boxes:
            box._stands_in = True
        yield boxes
    finally:
        for box in boxes:
            box._stands_in = False


def _plain(array: np.ndarray) -> np.ndarray:
    """An array that torch can take: real numbers, in memory of its own."""
    if array.dtype.kind not in "fiub":
        raise TypeError(f"its type is {array.dtype}")
    return np.array(array, dtype=np.float32 if array.dtype == np.float16 else None)

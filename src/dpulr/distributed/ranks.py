"""The processes of one run: `Alone`, or `Ranks` of a torch.distributed group. Every rank runs the same program.

Each rank sums the bounded signals of its own records, adds its share of the noise and rounds; then the shares are summed. So what
leaves a rank is noised, the noise of the sum is that of one process, and the sum is exact: the same bits on every rank
(docs/theory.md, section 9, "Shares"). Or rank 0 adds up the bare sums, noises them as one process would, and sends the release to
all. Rank 0 charges each step, and no rank reads a record before.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpulr import validate
from dpulr.accounting.ledger import Ledger
from dpulr.distributed.launch import RANK_TIMEOUT
from dpulr.distributed.pulse import Pulse, own_store
from dpulr.errors import InvalidArgument, RankLost, StepError
from dpulr.randomness import RandomSource, common_stream
from dpulr.sampling import PoissonSampling, ShuffledSampling

T = TypeVar("T")
Parallel = Literal["records", "passes"]
MOST_RANKS = 256
"""More shares of the noise would need a grid so coarse that their rounding shows (docs/theory.md, section 9)."""
COMPARE_EVERY = 100
"""Steps after which the ranks compare their parameters."""
_GLOO_READER, _LAST = "gloo_tcp_loop", 19
_FAILED, _CHARGED, _NO_GUARANTEE, _OTHER_STEPS, _OTHER_PARAMETERS = range(-1, 4)
"""What rank 0 says when a step is to be charged."""


class Alone:
    """One process: there is nobody to agree with. Also the list of what several ranks do together, in the order of a run."""

    rank, size = 0, 1
    sharded, parallel, noise_shares = False, "records", 1
    seconds = 0.0
    """Seconds spent in communication, waiting for others included."""

    def shared(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank. If making it raises, all raise it."""
        return make()

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks."""
        return [value]

    def agree(self, facts: Mapping[str, str]) -> None:
        """Refuse ranks that were started differently, by name."""

    def kept(self, ledger: Callable[[], Ledger]) -> Ledger:
        """The ledger, on rank 0; elsewhere a copy of it, in memory."""
        return ledger()

    def charged(
        self,
        charge: Callable[[], None],
        *,
        steps: int,
        parameters: Iterable[Tensor],
        reasons: Sequence[str],
        void: Callable[[str], None],
    ) -> None:
        """Charge a step on rank 0, when all ranks are there, after so many steps and with the same parameters; then on the others.

        If any of them has reasons for no guarantee, all call `void` with them before.
        """
        charge()

    def batch_stream(self, source: RandomSource) -> np.random.Generator:
        """Where batches are drawn from."""
        return source.batches()

    def rows(self, sampler: PoissonSampling | ShuffledSampling, records: int, rng: np.random.Generator) -> np.ndarray:
        """Which of the data set's rows are in this rank's part of the batch."""
        return sampler.draw(records, rng)

    def released(self, total: Any, privatise: Callable[[Any], Tensor], spacing: float | None = None) -> Tensor:
        """The release, from the sum over this rank's records and the function that noises it.

        Shares that lie on a grid are sent as whole numbers of its cells, `spacing` wide: half the bytes, and added up exactly.
        """
        return privatise(total)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return flag

    def bytes_sent(self, numbers: int, spacing: float | None = None) -> int:
        """Bytes that a rank sends per step, in a ring: a release of so many numbers, twice but for its own part of it."""
        each = 8 if spacing is None or self.noise_shares == 1 else 4
        return round(2 * (self.size - 1) / self.size * each * numbers)


class Ranks(Alone):
    """The ranks of a process group. Communication goes over a group of its own (gloo), so that nothing else gets in between."""

    def __init__(self, group: Any, *, timeout: float, sharded: bool, parallel: Parallel, shared_noise: bool) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size, self.seconds = members.index(dist.get_rank()), len(members), 0.0
        if shared_noise and self.size > MOST_RANKS:
            raise InvalidArgument(
                f"there are {self.size} ranks; at most {MOST_RANKS} can share the noise of one release. With shared_noise=False "
                "rank 0 adds it."
            )
        self.sharded, self.parallel, self.noise_shares = sharded, parallel, self.size if shared_noise else 1
        self._timeout, self._root, self._lost = timeout, members[0], ""
        self._pulse: Pulse | None = None
        self._group = self._together("while it was set up", lambda: self._own_group(members))
        _hold_back_gloo()
        names = self.gathered(f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()})")
        store = own_store(dist.distributed_c10d._get_default_store(), f"dpulr/{self.shared(lambda: secrets.token_hex(8))}")
        self._pulse, self._compared = Pulse(store, self.rank, names), -COMPARE_EVERY
        weakref.finalize(self, self._pulse.stop)
        self.agree({"sharded": str(sharded), "parallel": parallel, "shared_noise": str(shared_noise)})  # else they would not meet

    def _own_group(self, members: list[int]) -> Any:
        return dist.new_group(members, timeout=timedelta(seconds=self._timeout), backend="gloo", use_local_synchronization=True)

    # --- set-up -------------------------------------------------------------------------------------------------------
    def shared(self, make: Callable[[], T]) -> T:
        message: list[Any] = [None]
        if self.rank == 0:
            try:
                message = [(make(), None)]
            except Exception as problem:  # the others wait: they are told before it is raised here
                message = [(None, _portable(problem))]
                self._together("while it was set up", lambda: self._broadcast(message))
                raise
        value, failure = self._together("while it was set up", lambda: self._broadcast(message))
        if failure is not None:
            raise failure
        made: T = value
        return made

    def _broadcast(self, message: list[Any]) -> Any:
        dist.broadcast_object_list(message, src=self._root, group=self._group)
        return message[0]

    def gathered(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        self._together("while it was set up", lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def agree(self, facts: Mapping[str, str]) -> None:
        everybody = self.gathered(dict(facts))
        for name in facts:
            said = [other.get(name, "nothing") for other in everybody]
            usual = Counter(said).most_common(1)[0][0] if self.size > 2 else said[0]
            others = [rank for rank, value in enumerate(said) if value != usual]
            if others:
                rank, first = others[0], said.index(usual)
                raise InvalidArgument(
                    f"rank {rank} was started with another {name} than rank {first}: {_short(said[rank])}, not {_short(usual)}. "
                    "All ranks must run the same program with the same settings."
                )

    def kept(self, ledger: Callable[[], Ledger]) -> Ledger:
        opened: list[Ledger] = []

        def content() -> dict[str, Any]:
            opened.append(ledger())
            return opened[0].to_dict()

        copy = self.shared(content)
        return opened[0] if opened else Ledger.from_dict(copy)

    # --- a step -------------------------------------------------------------------------------------------------------
    def charged(
        self,
        charge: Callable[[], None],
        *,
        steps: int,
        parameters: Iterable[Tensor],
        reasons: Sequence[str],
        void: Callable[[str], None],
    ) -> None:
        compare = steps >= self._compared + COMPARE_EVERY
        digest = int(digest_of(parameters)[:15], 16) if compare else 0
        self._compared = steps if compare else self._compared
        own, all_know = torch.tensor([steps, digest, len(reasons)]), False

        def decide(everybody: Tensor) -> int:
            taken, digests, voiding = everybody.unbind(1)
            if bool((taken != taken[0]).any()):
                return _OTHER_STEPS
            if bool((digests != digests[0]).any()):
                return _OTHER_PARAMETERS
            if bool(voiding.any()) and not all_know:
                return _NO_GUARANTEE
            charge()
            return _CHARGED

        when = f"before step {steps + 1}, while it was charged"
        answer = self._decided(when, own, decide)
        if answer == _NO_GUARANTEE:
            for reason in [reason for theirs in self.gathered(list(reasons)) for reason in theirs]:
                void(reason)
            all_know = True
            answer = self._decided(when, own, decide)
        if answer == _OTHER_STEPS:
            raise StepError(f"the ranks have taken different numbers of steps: {self._by_rank(steps)}. All must take the same.")
        if answer == _OTHER_PARAMETERS:
            raise StepError(
                f"the ranks hold different parameters before step {steps + 1}: {self._by_rank(f'{digest:x}')}. Something beside "
                "engine.step() has changed them, or the processors compute differently: all ranks need the same kind."
            )
        if answer == _FAILED:
            raise RankLost("rank 0 could not charge the next step to its ledger: nothing is computed.")
        if self.rank:
            charge()

    def _by_rank(self, value: object) -> str:
        return ", ".join(f"rank {rank} has {said}" for rank, said in enumerate(self.gathered(str(value))))

    def _decided(self, when: str, own: Tensor, decide: Callable[[Tensor], int]) -> int:
        """What rank 0 decides when it has heard all ranks. If deciding fails, the others are told before it is raised there.

        One meeting: to rank 0 and back is a fraction of a reduction, which for few numbers goes round twice as well.
        """
        answer, failures, away = torch.full((1,), _FAILED), list[BaseException](), [0.0]

        def meeting() -> None:
            heard = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(own, heard, self._root, group=self._group)
            if heard is not None:
                began = time.perf_counter()
                try:
                    answer.fill_(decide(torch.stack(heard)))
                except BaseException as problem:
                    failures.append(problem)
                away[0] = time.perf_counter() - began
            dist.broadcast(answer, self._root, group=self._group)

        self._together(when, meeting)
        self.seconds -= away[0]  # it was no communication
        for problem in failures:
            raise problem
        return int(answer.item())

    def batch_stream(self, source: RandomSource) -> np.random.Generator:
        """One of its own; where all ranks work on the same batch, a common one, whose secret key rank 0 has sent."""
        if self.parallel == "records" or type(source) is not RandomSource:
            return source.batches()
        seed, key = self.shared(lambda: (source.insecure_seed, secrets.randbits(256)))
        return common_stream(key) if seed is None else RandomSource(seed).batches()

    def rows(self, sampler: PoissonSampling | ShuffledSampling, records: int, rng: np.random.Generator) -> np.ndarray:
        """Of a data set that all ranks see, rank r of W has the rows r, r + W, r + 2 W, ...; of its own shard, all."""
        if self.sharded or self.parallel == "passes":
            return sampler.draw(records, rng)
        own = len(range(self.rank, records, self.size))
        return sampler.draw(own, rng) * self.size + self.rank

    def released(self, total: Any, privatise: Callable[[Any], Tensor], spacing: float | None = None) -> Tensor:
        if self.noise_shares > 1:
            share = privatise(total)
            if spacing is None:
                return self._summed(share.cpu()).to(share.device)
            most = (2**31 - 1) // self.size  # far more than there will be: all of them together must not overflow
            cells = share.div_(spacing).nan_to_num_(0).clamp_(-most, most).int()
            return self._summed(cells.cpu()).to(share).mul_(spacing)
        values = total.cpu()
        self._together("in this step", lambda: dist.reduce(values, self._root, group=self._group))
        values = privatise(values.to(total.device)).cpu() if self.rank == 0 else torch.empty_like(values)
        self._together("in this step", lambda: dist.broadcast(values, self._root, group=self._group))
        return values.to(total.device)

    def any(self, flag: bool) -> bool:
        return bool(self._decided("after a step", torch.tensor([int(flag)]), lambda everybody: int(everybody.any())))

    # --- failures -----------------------------------------------------------------------------------------------------
    def _summed(self, values: Tensor) -> Tensor:
        self._together("in this step", lambda: dist.all_reduce(values, group=self._group))
        return values

    def _together(self, when: str, meeting: Callable[[], T]) -> T:
        """Something that all ranks do at once. If it fails, somebody is missing, and is named."""
        if self._lost:
            raise RankLost(self._lost)
        if self._pulse is not None:
            self._pulse.meetings += 1
        began = time.perf_counter()
        try:
            return meeting()
        except RuntimeError as problem:
            who = "a rank has ended, died or hangs" if self._pulse is None else self._pulse.verdict(problem)
            self._lost = (
                f"{who}; it was missed {when} (time-out: {self._timeout:g} s). What was charged counts as spent, whether or not it "
                "was released. Start all ranks again with the same ledger, or resume the run."
            )
            raise RankLost(self._lost) from problem
        finally:
            self.seconds += time.perf_counter() - began


def join(
    group: Any = None,
    *,
    timeout: float = RANK_TIMEOUT,
    sharded: bool = False,
    parallel: Parallel = "records",
    shared_noise: bool = True,
) -> Alone:
    """The ranks of this group, or of torch.distributed's default one; alone if there is none or nobody else in it."""
    validate.timeout("rank_timeout", timeout)
    validate.boolean("sharded", sharded)
    validate.boolean("shared_noise", shared_noise)
    validate.one_of("parallel", parallel, get_args(Parallel))
    if sharded and parallel == "passes":
        raise InvalidArgument("parallel='passes' needs all records on every rank: sharded must be False.")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        if sharded:
            raise InvalidArgument("sharded is True, but torch.distributed is not initialised: there is one process, with all data.")
        return Alone()
    if dist.get_rank(group) < 0:
        raise InvalidArgument("this process is not in process_group: only its members can train.")
    if dist.get_world_size(group) == 1:
        return Alone()
    return Ranks(group, timeout=timeout, sharded=sharded, parallel=parallel, shared_noise=shared_noise)


def _hold_back_gloo() -> None:
    """gloo's reading thread tries a lock again and again, though the thread that holds it may wait for the same core: for
    milliseconds in each step, where every process has one core. The lower priority lets that one go first.
    """
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == _GLOO_READER:
                os.setpriority(os.PRIO_PROCESS, int(task.name), _LAST)


def digest_of(tensors: Iterable[Tensor], key: bytes = b"") -> str:
    """A hash of values and shapes."""
    digest = blake2b(digest_size=16, key=key)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _portable(problem: Exception) -> Exception:
    """An exception that can be sent, of its kind if possible."""
    try:
        pickle.loads(pickle.dumps(problem))
        return problem
    except Exception:  # an exception of a user's class may do anything when it is rebuilt
        return RankLost(f"rank 0 failed: {type(problem).__name__}: {problem}")


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."

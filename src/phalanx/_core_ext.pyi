"""Types of the native module (_core/bindings.cpp). tests/unit/test_native.py checks that the names agree."""

from collections.abc import Callable, Sequence
from typing import Any

ANY_SOURCE: int
MAX_RANKS: int
UNKNOWN_STATUS: int

def affinity() -> list[int]: ...
def cpu_quota() -> int: ...
def kernel_variant() -> str: ...
def writable(address: int, size: int, /) -> bool: ...
def reduces(dtype: int, op: int, /) -> bool: ...
def reduce_buffers(dtype: int, op: int, dst: int, srcs: list[int], count: int, factors: list[float], /) -> None: ...
def tuning_for(ranks: int, cpus: int) -> Tuning: ...
def own_identity() -> tuple[int, int]: ...
def next_completion() -> int: ...
def close_completions(closed: bool, /) -> None: ...
def set_folders(ours: str, autograd: str, others: list[str], /) -> None: ...
def origin() -> tuple[str, int]: ...
def next_question() -> tuple[bool, bool] | None: ...
def answer(text: str, /) -> None: ...
def close_listener(closed: bool, /) -> None: ...
def set_slow(seconds: float, tell: Callable[[int, int, int, list[int]], None] | None) -> None: ...

class Tuning:
    slot_bytes: int
    chunk_bytes: int
    one_shot_bytes: int
    message_chunk_bytes: int
    check: int
    crowded: int
    spin_us: int

class Segment:
    @staticmethod
    def create_memfd(size: int, tuning: Tuning, nonce: bytes, /) -> Segment: ...
    @staticmethod
    def create_file(path: str, size: int, tuning: Tuning, nonce: bytes, /) -> Segment: ...
    @staticmethod
    def open(path: str, nonce: bytes, /) -> Segment: ...
    @property
    def fd(self) -> int: ...
    @property
    def tuning(self) -> Tuning: ...
    def close_fd(self) -> None: ...

class Peer:
    @staticmethod
    def watch(pid: int, start: int, /) -> Peer | None: ...
    @property
    def dead(self) -> bool: ...
    @property
    def status(self) -> int: ...

class BlackBox:
    def __init__(self, path: str, capacity: int, rank: int, world_size: int, program: str, /) -> None: ...
    def remember(self, text: str, /) -> int: ...
    def begin(
        self,
        group: int,
        op: int,
        reduce_op: int,
        peer: int,
        dtype: int,
        count: int,
        tag: int,
        bytes_in: int,
        bytes_out: int,
        timeout: float,
        is_async: bool,
        shape: tuple[int, ...] | list[int],
        /,
    ) -> int: ...
    def number(self, record: int, seq: int, /) -> None: ...
    def start(self, record: int, /) -> None: ...
    def end(self, record: int, well: bool, /) -> None: ...
    def set_rank(self, rank: int, world_size: int, /) -> None: ...
    def contents(self) -> bytes: ...

class Pending:
    @property
    def is_over(self) -> bool: ...
    def wait(self, timeout: float, /) -> int: ...
    def missing(self) -> list[int]: ...
    def notify(self, token: int, /) -> bool: ...
    @property
    def result(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def source(self) -> int: ...

class Group:
    def __init__(self, segment: Segment, rank: int, /) -> None: ...
    def watch(self, processes: Sequence[tuple[int, int]], /) -> None: ...
    def run(
        self,
        op: int,
        reduce_op: int,
        root: int,
        dtype: int,
        count: int,
        layout: int,
        factor: float,
        timeout: float,
        inputs: list[int],
        input_sizes: list[int],
        num_inputs: int,
        inputs_listed: bool,
        outputs: list[int],
        output_sizes: list[int],
        num_outputs: int,
        outputs_listed: bool,
        shape: tuple[int, ...] | list[int],
        /,
    ) -> tuple[int, int] | None: ...
    def run_single(
        self,
        op: int,
        reduce_op: int,
        root: int,
        dtype: int,
        count: int,
        layout: int,
        factor: float,
        timeout: float,
        address: int,
        size: int,
        reads: bool,
        writes: bool,
        shape: tuple[int, ...] | list[int],
        /,
    ) -> tuple[int, int] | None: ...
    def start(
        self,
        kept: object,
        op: int,
        reduce_op: int,
        root: int,
        dtype: int,
        count: int,
        layout: int,
        factor: float,
        timeout: float,
        inputs: list[int],
        input_sizes: list[int],
        num_inputs: int,
        inputs_listed: bool,
        outputs: list[int],
        output_sizes: list[int],
        num_outputs: int,
        outputs_listed: bool,
        shape: tuple[int, ...] | list[int],
        /,
    ) -> int | Pending: ...
    def start_single(
        self,
        kept: object,
        op: int,
        reduce_op: int,
        root: int,
        dtype: int,
        count: int,
        layout: int,
        factor: float,
        timeout: float,
        address: int,
        size: int,
        reads: bool,
        writes: bool,
        shape: tuple[int, ...] | list[int],
        /,
    ) -> int | Pending: ...
    def message(
        self,
        kept: object,
        sends: bool,
        peer: int,
        tag: int,
        dtype: int,
        layout: int,
        count: int,
        timeout: float,
        address: int,
        size: int,
        shape: tuple[int, ...] | list[int],
        /,
    ) -> int | Pending: ...
    def abort(self, text: str, /) -> None: ...
    def leave(self, exiting: bool, /) -> None: ...
    def say_last_words(self, text: str, /) -> None: ...
    def last_words(self, rank: int, /) -> str: ...
    def failure(self) -> dict[str, object]: ...
    def keep_records(self, box: BlackBox, group: str, path: str, /) -> None: ...
    def testimonies(self) -> list[tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]]: ...
    def take_note(self) -> tuple[int, int, list[tuple[int, tuple[bool, int, tuple[int, ...]], str]]] | None: ...
    def ask(self, rank: int, seconds: float, /) -> str | None: ...
    @property
    def was_told(self) -> bool: ...
    def has_left(self, rank: int, /) -> bool: ...
    def box_of(self, rank: int, /) -> str: ...
    token: int
    @property
    def check(self) -> int: ...
    @property
    def forked(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def seq(self) -> int: ...

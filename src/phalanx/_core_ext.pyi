"""Types of the native module (_core/bindings.cpp). tests/unit/test_native.py checks that the names agree."""

MAX_RANKS: int

def affinity() -> list[int]: ...
def cpu_quota() -> int: ...
def kernel_variant() -> str: ...
def reduces(dtype: int, op: int, /) -> bool: ...
def reduce_buffers(dtype: int, op: int, dst: int, srcs: list[int], count: int, factors: list[float], /) -> None: ...
def tuning_for(ranks: int, cpus: int) -> Tuning: ...

class Tuning:
    slot_bytes: int
    chunk_bytes: int
    one_shot_bytes: int
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

class Group:
    def __init__(self, segment: Segment, rank: int, /) -> None: ...
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
        /,
    ) -> int: ...
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
        /,
    ) -> int: ...
    def abort(self, text: str, /) -> None: ...
    def leave(self) -> None: ...
    def failure(self) -> dict[str, object]: ...
    def describe(self, rank: int, seq: int, /) -> tuple[int, int, int, int, int, int, int]: ...
    @property
    def forked(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def seq(self) -> int: ...

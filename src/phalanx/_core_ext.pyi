import enum
from collections.abc import Callable, Sequence
from typing import Any, overload

class CoreError(OSError, RuntimeError):
    pass

class Peers(enum.Enum):
    """Whom a rank waits for in a call."""

    none = 0

    root = 1

    all = 2

    peer = 3

class OpTraits:
    """A row of the table of ops."""

    @property
    def name(self) -> str: ...
    @property
    def is_message(self) -> bool: ...
    @property
    def rooted(self) -> bool: ...
    @property
    def reduces(self) -> bool: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def shared_result(self) -> bool: ...
    @property
    def exchanges_sizes(self) -> bool: ...
    @property
    def shape_of_outputs(self) -> bool: ...
    @property
    def others_wait_for(self) -> Peers: ...
    @property
    def root_waits_for(self) -> Peers: ...
    def __repr__(self) -> str: ...

class DTypeTraits:
    """A row of the table of dtypes."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    def __repr__(self) -> str: ...

OPS: tuple[OpTraits, ...]

DTYPES: tuple[DTypeTraits, ...]

NUM_REDUCIBLE: int = ...

OTHER_DTYPE: int = ...

class Shape:
    """Sizes of a tensor (given as a tuple), or of the tensors of a list."""

    def __init__(self, sizes: object, count: int = ...) -> None: ...
    @property
    def num(self) -> int: ...
    @property
    def listed(self) -> bool: ...
    @property
    def sizes(self) -> tuple[int, ...]:
        """The first of them."""

    @property
    def may_differ(self) -> bool:
        """Whether ranks may differ in it."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class Description:
    """What a call is, as all ranks know it."""

    def __init__(
        self,
        op: str,
        *,
        reduce_op: int = ...,
        dtype: int = ...,
        unlisted_dtype: int = ...,
        root: int = ...,
        count: int = ...,
        layout: int = ...,
        sizes: object = ...,
        peer: int = ...,
        tag: int = ...,
        flags: int = ...,
        device: int = ...,
    ) -> None: ...
    @property
    def op(self) -> str: ...
    @property
    def reduce_op(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def unlisted_dtype(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def layout(self) -> int: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def peer(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def factor(self) -> float: ...
    def with_flags(self, flags: int) -> Description:
        """The same call, come another way."""

    def with_device(self, device: int) -> Description:
        """The same call, with tensors of this device."""

    def with_peer(self, peer: int) -> Description:
        """The same message, with this peer."""

    def agrees_with(self, other: Description) -> bool:
        """Whether the two are the same call, whatever the shape is."""

    def fits(self, receive: Description) -> bool:
        """
        Of a message: whether it has the dtype and number of elements that are received.
        """

class DividedCall(Description):
    """A call in which ranks exchange sizes pair by pair."""

    @property
    def balance(self) -> int: ...

class MadeCall:
    """A call that a rank has made."""

    def __init__(self, description: Description, *, seq: int, result: int = ..., where: str = ...) -> None: ...
    @property
    def description(self) -> Description: ...
    @property
    def seq(self) -> int: ...
    @property
    def result(self) -> int:
        """Of what the call before gave, where that is compared."""

    @property
    def where(self) -> str: ...

class Testimony:
    """What the finder of a mismatch saw of a rank."""

    def __init__(
        self, *, call: MadeCall | None = ..., completed: MadeCall | None = ..., refused: str = ..., posted: int = ...
    ) -> None: ...
    @property
    def call(self) -> MadeCall | None:
        """None: the rank had not made it."""

    @property
    def completed(self) -> MadeCall | None:
        """The last call that ended well there."""

    @property
    def posted(self) -> int:
        """Where the group only posts: the last call that the rank had posted."""

    @property
    def refused(self) -> str:
        """The last call of the kind that the rank had refused."""

class ShapeSide:
    def __init__(self, *, rank: int, shape: Shape, where: str) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def where(self) -> str: ...

class ShapeNote:
    """Two ranks whose calls agree but for the shape of a tensor."""

    def __init__(self, *, op: str, seq: int, one: ShapeSide, other: ShapeSide) -> None: ...
    @property
    def op(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def sides(self) -> tuple[ShapeSide, ShapeSide]: ...

class Misfit:
    """The message that does not fit the receive of the failure's finder."""

    def __init__(self, *, sent: Description, where: str) -> None: ...
    @property
    def sent(self) -> Description: ...
    @property
    def where(self) -> str: ...
    @property
    def fitting_seq(self) -> int:
        """
        Where messages come in another order: the number of another one that fits; 0: none is known.
        """

    @property
    def is_sent_fitting(self) -> bool:
        """
        Whether what was sent fits that receive; else what is received fits that message.
        """

class Splits:
    """Two ranks of which one sends what the other does not expect."""

    def __init__(self, *, sender: int, receiver: int, bytes_sent: int, bytes_expected: int) -> None: ...
    @staticmethod
    def find(sent: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Splits | None:
        """
        The first two ranks that do not fit, of the bytes that each rank sends to and expects from each.
        """

    @property
    def sender(self) -> int: ...
    @property
    def receiver(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_expected(self) -> int: ...

class Failure:
    """The first failure of a group."""

    def __init__(
        self,
        *,
        kind: int,
        rank: int,
        call: Description,
        seq: int,
        where: str = ...,
        peer: int = ...,
        misfit: Misfit | None = ...,
        splits: Splits | None = ...,
        missing: Sequence[int] = ...,
        other_tags: Sequence[int] = ...,
        leaving: int = ...,
        status: int = ...,
        reason: str = ...,
        agreed: int | None = ...,
    ) -> None: ...
    @property
    def kind(self) -> int: ...
    @property
    def rank(self) -> int:
        """Who found it."""

    @property
    def call(self) -> Description:
        """What the finder was doing."""

    @property
    def seq(self) -> int: ...
    @property
    def agreed(self) -> int:
        """
        Of a mismatch: the last call up to which the two ranks are known to agree.
        """

    @property
    def where(self) -> str:
        """The finder's line."""

    @property
    def peer(self) -> int:
        """The other side of a mismatch or message; the rank that left or died."""

    @property
    def misfit(self) -> Misfit | None: ...
    @property
    def sizes_differ(self) -> bool:
        """
        Whether it is about sizes that ranks exchange, and not known which ranks do not fit.
        """

    @property
    def splits(self) -> Splits | None: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def asked(self) -> bool:
        """Whether the missing ranks were asked just before where they are."""

    @property
    def other_tags(self) -> list[int]:
        """Of messages that came instead of the one that is missing: the lowest."""

    @property
    def leaving(self) -> int:
        """How the peer left."""

    @property
    def status(self) -> int:
        """How the peer's process ended, as waitpid gives it."""

    @property
    def command_line(self) -> str:
        """Of the program that has replaced the peer's."""

    @property
    def reason(self) -> str:
        """Of an abort."""

def hash_of_result(op: str, inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]]) -> int:
    """
    Of what must be equal on all ranks when a call has ended, in tensors given by address and bytes; 0 for other ops.
    """

def affinity() -> list[int]:
    """CPUs that this process may run on."""

def cpu_quota() -> int:
    """CPUs that the cgroup grants, rounded up; 0 where it sets no limit."""

def kernel_variant() -> str: ...
def writable(address: int, size: int) -> bool: ...
def progress_error() -> int: ...
def reduces(dtype: int, op: int) -> bool: ...
def reduce_buffers(
    dtype: int,
    op: int,
    dst: int,
    srcs: Sequence[int],
    count: int,
    factors: Sequence[float],
    carry_in: int = ...,
    carry_out: int = ...,
    num_srcs: int = ...,
) -> None:
    """
    With a carry: one part of a reduction of `num_srcs` sources, whose running values go from part to part.
    """

def accumulator_size(dtype: int) -> int: ...

class Tuning:
    @property
    def slot_bytes(self) -> int: ...
    @slot_bytes.setter
    def slot_bytes(self, arg: int, /) -> None: ...
    @property
    def chunk_bytes(self) -> int: ...
    @chunk_bytes.setter
    def chunk_bytes(self, arg: int, /) -> None: ...
    @property
    def one_shot_bytes(self) -> int: ...
    @one_shot_bytes.setter
    def one_shot_bytes(self, arg: int, /) -> None: ...
    @property
    def message_chunk_bytes(self) -> int: ...
    @message_chunk_bytes.setter
    def message_chunk_bytes(self, arg: int, /) -> None: ...
    @property
    def level(self) -> int: ...
    @level.setter
    def level(self, arg: int, /) -> None: ...
    @property
    def only_posts(self) -> bool: ...
    @only_posts.setter
    def only_posts(self, arg: bool, /) -> None: ...
    @property
    def crowded(self) -> int: ...
    @crowded.setter
    def crowded(self, arg: int, /) -> None: ...
    @property
    def spin_us(self) -> int: ...
    @spin_us.setter
    def spin_us(self, arg: int, /) -> None: ...

def tuning_for(ranks: int, cpus: int) -> Tuning: ...

class Segment:
    @staticmethod
    def create_memfd(size: int, tuning: Tuning, nonce: bytes, ranks: Sequence[int] | None = ...) -> Segment:
        """`ranks` has the rank of each seat."""

    @staticmethod
    def create_file(path: str, size: int, tuning: Tuning, nonce: bytes, ranks: Sequence[int] | None = ...) -> Segment:
        """The same."""

    @staticmethod
    def open(path: str, nonce: bytes, size: int) -> Segment: ...
    @staticmethod
    def create_private(size: int, tuning: Tuning) -> Segment:
        """Of this process alone, for ranks that are threads."""

    @property
    def fd(self) -> int: ...
    @property
    def tuning(self) -> Tuning: ...
    @property
    def ranks(self) -> list[int]:
        """By seat."""

    def close_fd(self) -> None: ...

def own_identity() -> tuple[int, int]: ...
def own_program() -> int:
    """Tells this program from one that replaces it by exec."""

class Peer:
    @staticmethod
    def watch(pid: int, start: int, program: int = 0) -> Peer | None: ...
    @property
    def dead(self) -> bool: ...
    @property
    def ending(self) -> bool: ...
    @property
    def replaced_by(self) -> str | None: ...
    @property
    def status(self) -> int: ...

class Statistics:
    def read(self) -> list[tuple[int, int, int, float, float]]:
        """
        Of each op that was called: its number, calls, bytes, seconds waiting and seconds moving.
        """

class GroupEnd:
    def __init__(self, segment: Segment, rank: int) -> None: ...
    def watch(self, processes: Sequence[tuple[int, int, int]]) -> None:
        """One per rank: pid, start time and program."""

    def abort(self, reason: str) -> None: ...
    def leave(self, exiting: bool) -> None: ...
    def say_last_words(self, text: str) -> None: ...
    def last_words(self, rank: int) -> str: ...
    def failure(self) -> Failure: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def ranks(self) -> list[int]:
        """The rank of each seat in the segment."""

    @property
    def forked(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def seq(self) -> int: ...
    def drain(self) -> int: ...
    @property
    def identity(self) -> str: ...
    def testimonies(self) -> list[Testimony]: ...
    def take_note(self) -> ShapeNote | None: ...
    def refuse_call(self, text: str) -> None: ...
    def refuse_message(self, sends: bool, peer: int, tag: int, text: str) -> None: ...
    def refusals(self, rank: int) -> list[str]: ...
    def ask(self, rank: int) -> None: ...
    def answer_of(self, rank: int, seconds: float) -> str | None: ...
    @property
    def was_told(self) -> bool: ...
    def has_left(self, rank: int) -> bool: ...
    def box_of(self, rank: int) -> str: ...
    @property
    def level(self) -> int: ...
    @property
    def token(self) -> int: ...
    @token.setter
    def token(self, arg: int, /) -> None: ...
    def pending_calls(self, seconds: float) -> list[PendingCall] | None:
        """
        Carries out what can be carried out now, and returns what is left: the first collective and all messages. None where a lane is busy for all of this time.
        """

    def keep_records(self, box: BlackBox, group: int, path: str) -> None: ...
    def watch_deaths(self, box: BlackBox, job_ranks: Sequence[int], folder: str) -> None: ...

class CallHandle:
    def wait(self, arg: float, /) -> int: ...
    def missing(self) -> list[int]: ...
    def notify(self, arg: int, /) -> bool: ...
    def poll(self) -> int:
        """
        The result so far, for one who asks instead of waiting: wakes the progress thread while it is pending.
        """

    @property
    def result(self) -> int: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def seq(self) -> int: ...
    @property
    def source(self) -> int: ...

def main_thread_in_call() -> bool:
    """Whether the main thread waits in a call of ours."""

def next_completion(arg0: bool, arg1: bool, /) -> int: ...
def leave_completions() -> None: ...
def push_completion(arg: int, /) -> None: ...
def close_completions(arg: bool, /) -> None: ...
def look_for_deaths() -> None: ...
def begin_making() -> None: ...
def end_making() -> None: ...
def next_question() -> tuple[bool, bool] | None:
    """
    Whether somebody asks where this rank is, and whether there is a note to be told; None: the listener is closed.
    """

def answer(text: str) -> None: ...
def close_listener(closed: bool) -> None: ...
def set_slow(
    seconds: float,
    tell: Callable[[int, int, int, list[int]], None] | None,
    tell_refused: Callable[[int, int, int, int, list[int]], None] | None = None,
) -> None: ...
def set_folders(ours: str, autograd: str, others: Sequence[str]) -> None: ...
def origin() -> tuple[str, int]:
    """Where in the program this call is made, and how it came there."""

class WaitingThread:
    @property
    def id(self) -> int: ...
    @property
    def thread(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def op(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def is_bounded(self) -> bool: ...
    @property
    def since_ns(self) -> int: ...
    @property
    def where(self) -> str: ...

class PendingCall:
    @property
    def op(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def is_matched(self) -> bool: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def where(self) -> str: ...

def long_waits() -> list[WaitingThread]:
    """The waits of threads of this process that last long."""

def set_long(tell: Callable[[], None] | None, seconds: float = 1.0) -> None:
    """
    Calls it whenever a wait has become one of `long_waits()`, after so many seconds.
    """

class BlackBox:
    """
    The last calls of this process, in a file, or in memory where `fd` is -1.
    """

    def __init__(self, fd: int, capacity: int, rank: int, world_size: int, program: str) -> None: ...
    def remember_group(
        self, name: str, rank: int, ranks: str, *, description: str = ..., identity: str = ..., venue: str = ...
    ) -> int:
        """
        The group, for `begin`, `begin_making` and `GroupEnd.keep_records`; 0: there is no room for it.
        """

    def begin(
        self, group: int, description: Description, *, bytes_in: int, bytes_out: int, timeout: float, is_async: bool
    ) -> int:
        """Records a call of a rank that is a thread."""

    def begin_making(self, group: int, number: int, timeout: float) -> int: ...
    def number(self, record: int, seq: int) -> None: ...
    def start(self, record: int) -> None: ...
    def came_from(self, record: int, sender: int) -> None: ...
    def end(self, record: int, well: bool, last_arriver: int = ...) -> None: ...
    def blame(self, record: int, failure: int, rank: int) -> None: ...
    def set_rank(self, rank: int, world_size: int) -> None: ...
    def say_end(self, how: int, exception: str, ns: int) -> None: ...
    def watch_in_making(self, pid: int, start: int, program: int, job_rank: int, folder: str) -> None: ...
    def tell_exit_status(self) -> None: ...
    def move_to(self, fd: int) -> None: ...
    def contents(self) -> bytes: ...

class Agreement:
    """Calls that ranks post and compare, without ever waiting."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        processes: Sequence[tuple[int, int, int]],
        token: int,
        engine: int = ...,
        matches_tags: bool = ...,
    ) -> None: ...
    @overload
    def post(self, call: DividedCall, result: int = ...) -> int: ...
    @overload
    def post(self, call: Description, result: int = ...) -> int:
        """The number of the call among this rank's."""

    @overload
    def begin(self, call: DividedCall) -> int: ...
    @overload
    def begin(self, call: Description) -> int:
        """
        Posts a call that is about to be made. 0: the group was broken or left before, and nothing is posted. Below 0: minus its number, and the ranks differ. In both cases the call must not be made.
        """

    def finish(self, call: Description, seq: int) -> bool:
        """
        The engine has ended the call well. Returns whether the group is broken.
        """

    def end(self, call: Description, seq: int, well: bool) -> None:
        """For reports and records: the call has ended."""

    @property
    def is_broken(self) -> bool:
        """
        Whether ranks are known to disagree, or the group has failed otherwise.
        """

    def wait_for_failure(self, seconds: float) -> bool:
        """
        Of a broken group: waits until the failure is known. Returns whether it is.
        """

    def posted(self, rank: int) -> int:
        """The number of the last collective that a rank has posted."""

    def expect_any_sender(self) -> None:
        """
        This rank receives from anybody: from now on its receives are not compared.
        """

    def messages_posted(self, peer: int, sends: bool) -> int:
        """
        How many messages a peer has posted to this rank (it is the sender), or from it.
        """

    def place_of(self, call: Description, seq: int) -> str:
        """Where this rank has made a call."""

    def is_gone(self, rank: int) -> bool:
        """Whether a rank has left, or its process is gone."""

    def has_left_well(self, rank: int) -> bool:
        """Whether a rank has left in order."""

    def fail_by_end(self, peer: int, call: Description, seq: int) -> None:
        """This rank waits in a call for a rank that is gone."""

    def fail_by_timeout(self, missing: Sequence[int], call: Description, seq: int) -> None:
        """This rank gives up waiting in a call for these ranks."""

    def abort(self, reason: str) -> None: ...
    def ask(self, rank: int) -> None: ...
    def answer_of(self, rank: int, seconds: float) -> str | None: ...
    def failure(self) -> Failure | None: ...
    def testimonies(self) -> list[Testimony]: ...
    def take_note(self) -> ShapeNote | None: ...
    @property
    def seq(self) -> int: ...
    @property
    def level(self) -> int: ...
    @property
    def forked(self) -> bool: ...
    @property
    def has_left(self) -> bool: ...
    @property
    def identity(self) -> str: ...
    def keep_records(self, box: BlackBox, group: int, path: str) -> None: ...
    def box_of(self, rank: int) -> str: ...
    def say_last_words(self, text: str) -> None: ...
    def last_words(self, rank: int) -> str: ...
    def leave(self, exiting: bool = ...) -> None: ...

class LocalAgreement:
    """
    Calls that ranks post and compare which are threads of one process. The world that runs them has the clock, and tells who is gone.
    """

    def __init__(self, segment: Segment, rank: int) -> None: ...
    def post(self, call: Description, where: str = ..., result: int = ...) -> int:
        """
        The number of the collective among this rank's. `result` is a hash of what the call before gave, where results are compared.
        """

    def compare_with(self, peer: int) -> bool:
        """
        Compares with a rank, as far as both have posted: enough if all that have posted are known to agree. Whether this rank has found a difference, now or before.
        """

    def report_now(self, now: float) -> bool:
        """
        Reports what this rank has found, and does not wait for ranks that have not posted the call. Whether the group has failed.
        """

    def fail(self, failure: Failure, now: float) -> None:
        """Another failure. A difference that this rank has found comes first."""

    def expire(
        self, call: Description, seq: int, where: str, missing: Sequence[int], other_tags: Sequence[int], now: float
    ) -> None:
        """
        The time of a call of this rank is up, for which `missing` have not come.
        """

    def lose(self, peer: int, call: Description, seq: int, where: str, now: float) -> None:
        """This rank waits in a call for a peer that has left, or died."""

    def failure(self) -> Failure | None: ...
    def testimonies(self) -> list[Testimony]: ...
    def take_note(self) -> ShapeNote | None: ...
    def set_completed(self, seq: int) -> None:
        """For reports: this rank's collectives up to this one have ended well."""

    def leave(self, leaving: int) -> None:
        """This rank makes no further call."""

    def die(self, status: int) -> None:
        """This rank ends as a process that is killed, with this status."""

    def give_up(self) -> None:
        """This rank was told that the group has failed."""

    def has_left(self, rank: int) -> bool:
        """Whether the rank has left, or died."""

    def is_gone(self, rank: int) -> bool:
        """Whether the rank makes no further call."""

    def say_last_words(self, text: str) -> None:
        """The first words stay."""

    def last_words(self, rank: int) -> str: ...
    def refuse_call(self, text: str) -> None: ...
    def refuse_message(self, sends: bool, peer: int, tag: int, text: str) -> None: ...
    def close_note(self, call: Description) -> None:
        """
        Before a call is handed over, which may be long before it is posted: the rank has not refused it after all.
        """

    def refusals(self, rank: int) -> list[str]: ...

FINISHED: int = ...

FAILED: int = ...

WAS_BROKEN: int = ...

FORKED: int = ...

NESTED: int = ...

LEFT: int = ...

NO_MEMORY: int = ...

PENDING: int = ...

NO_SPACE: int = ...

NOT_WRITABLE: int = ...

FAILURE_NONE: int = ...

FAILURE_MISMATCH: int = ...

FAILURE_TIMEOUT: int = ...

FAILURE_ABORTED: int = ...

FAILURE_LEFT: int = ...

FAILURE_LOST: int = ...

FAILURE_MESSAGE: int = ...

LEAVING_NO: int = ...

LEAVING_CLOSED: int = ...

LEAVING_EXITING: int = ...

LEAVING_REPLACED: int = ...

REST_NOTHING: int = ...

REST_MOVING: int = ...

REST_WAITING: int = ...

CHECK_OFF: int = ...

CHECK_ON: int = ...

CHECK_FULL: int = ...

ASYNC: int = ...

IN_BACKWARD: int = ...

BY_REDUCER: int = ...

NO_REDUCE_OP: int = ...

NO_RANK: int = ...

ANY_SOURCE: int = ...

ANY_COUNT: int = ...

UNKNOWN_PEER: int = ...

UNKNOWN_TAG: int = ...

UNKNOWN_STATUS: int = ...

NO_DTYPE: int = ...

MAX_RANKS: int = ...

SIZES_KEPT: int = ...

INLINE_BYTES: int = ...

ENVELOPES: int = ...

RECORD_CALL: int = ...

RECORD_MAKING: int = ...

STATE_SCHEDULED: int = ...

STATE_STARTED: int = ...

STATE_COMPLETED: int = ...

STATE_FAILED: int = ...

BOX_RUNNING: int = ...

BOX_ENDED_WELL: int = ...

BOX_FAILED: int = ...

ENDING_UNKNOWN: int = ...

ENDING_EXIT: int = ...

ENDING_EXCEPTION: int = ...

ENDING_CONSEQUENCE: int = ...

BOX_VERSION: int = ...

BOX_HEADER_BYTES: int = ...

BOX_MOST_DEATHS: int = ...

MISMATCH_GRACE: float = ...

REFUSAL_GRACE: float = ...

BOX_MARKING: int = ...

BOX_MAGIC: bytes = ...

BOX_DIVIDER: str = ...

BOX_HEADER_FIELDS: tuple[tuple[str, int, str], ...]

BOX_DEATH_FIELDS: tuple[tuple[str, int, str], ...]

BOX_GROUP_FIELDS: tuple[tuple[str, int, str], ...]

BOX_RECORD_FIELDS: tuple[tuple[str, int, str], ...]

REDUCE_OPS: tuple[str, ...]

DEVICES: tuple[str, ...]

ENGINES: tuple[str, ...]

def set_reduce_ops(classes: Sequence[object]) -> None:
    """
    Classes whose hash is the number of the reduce op. To be called before `learn_options`.
    """

def learn_options(type: type, samples: Sequence[object]) -> dict[str, bool]:
    """
    Takes a class for one of torch's options. Returns whether each of its fields is read from memory.
    """

def read_options(
    options: object, reduce_op: bool, root: bool, root_tensor: bool
) -> tuple[int, bool, int, int, int] | None:
    """
    For tests: timeout in milliseconds, asynchronous or not, reduce op, root, root tensor.
    """

def set_torch(
    api: object,
    plain_classes: Sequence[object],
    is_neg: object,
    is_conj: object,
    untyped_storage: object,
    resizable: object,
    uint8: object,
    int8: object,
    strided: object,
    look_closer: object,
) -> None:
    """
    What of torch the front reads tensors with. To be called once, before the first call.
    """

def learn_lazy_bits(samples: Sequence[tuple[object, bool, bool]]) -> bool:
    """
    Finds out where tensors say that they are lazily negated or conjugated, by (tensor, negated, conjugated). Returns whether it did; if not, torch's methods are asked.
    """

def num_refused_by_dlpack() -> int:
    """For tests: how many tensors DLPack has refused."""

def is_lazy(tensor: object) -> bool:
    """For tests: whether a tensor is lazily negated or conjugated."""

class ProblemKind(enum.Enum):
    """What is wrong with the arguments of a call."""

    not_a_list = 0

    wrong_length = 1

    empty_list = 2

    unlike_length = 3

    no_lists = 4

    not_the_root = 5

    wrong_dtype = 6

    wrong_size = 7

    wrong_product = 8

    wrong_own = 9

    wrong_rows = 10

    wrong_splits = 11

    wrong_sum = 12

    wrong_root = 13

    no_reduction = 14

    overlaps = 15

    overlaps_self = 16

class Problem:
    """
    What is wrong with the arguments of a call; ProblemKind says which facts count.
    """

    @property
    def kind(self) -> ProblemKind: ...
    @property
    def name(self) -> str: ...
    @property
    def other(self) -> str: ...
    @property
    def expected(self) -> int: ...
    @property
    def actual(self) -> int: ...
    @property
    def got(self) -> Any: ...
    @property
    def like(self) -> Any: ...

def set_memory_look(overlaps_itself: object, find_shared: object) -> None:
    """
    Who decides about tensors that are not contiguous: whether elements share memory, and which tensors do.
    """

class Form(enum.Enum):
    """One of torch's ways to make a collective."""

    barrier = 0

    all_reduce = 1

    all_reduce_coalesced = 2

    reduce = 3

    broadcast = 4

    broadcast_coalesced = 5

    all_gather = 6

    all_gather_single = 7

    all_gather_coalesced = 8

    all_gather_single_coalesced = 9

    gather = 10

    scatter = 11

    reduce_scatter = 12

    reduce_scatter_single = 13

    reduce_scatter_single_coalesced = 14

    all_to_all = 15

    all_to_all_single = 16

class Obstacle(enum.Enum):
    """Why a call can't be handed over as it is."""

    none = 0

    not_plain = 1

    overlap = 2

    not_writable = 3

    no_memory = 4

class Handed:
    """What became of a call that was to be handed over."""

    @property
    def obstacle(self) -> Obstacle: ...
    @property
    def result(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def pending(self) -> CallHandle | None: ...
    @property
    def written(self) -> list[tuple[int, int]]:
        """The addresses, from and to, of the memory that the core writes."""

def describe_call(
    form: Form,
    rank: int,
    size: int,
    *,
    output: object = None,
    source: object = None,
    reduce_op: int = -1,
    factor: float = 1.0,
    root: int = -1,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> Description | Problem: ...
def check_tensor(name: str, tensor: object, written: bool) -> int | Problem: ...
def check_tensors(name: str, tensors: object, num: int) -> Problem | None: ...
def run_call(
    group: GroupEnd, call: Description, inputs: object | None, outputs: object | None, timeout: float
) -> Handed:
    """Carries out a call whose tensors lie in plain memory."""

def start_call(
    group: GroupEnd, call: Description, inputs: object | None, outputs: object | None, timeout: float
) -> Handed:
    """Begins a call whose tensors lie in plain memory."""

def start_message(group: GroupEnd, sends: bool, tensor: object, peer: int, tag: int, timeout: float) -> Handed:
    """Begins a message whose tensor lies in plain memory."""

class Front:
    """A group's side of the front."""

    def __init__(self, group: object, timeout: float) -> None: ...
    @property
    def timeout(self) -> float:
        """Of calls that have none of their own, in seconds."""

    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...
    @property
    def copies(self) -> int:
        """How many calls in flight write to copies of tensors."""

    def count_copies(self, change: int) -> None:
        """
        A call that writes to copies has begun (1), or its copies are back (-1).
        """

    @property
    def coalescing(self) -> bool:
        """Whether a coalescing manager collects the works of calls."""

    @coalescing.setter
    def coalescing(self, arg: bool, /) -> None: ...
    def close(self) -> None: ...

def front_method(name: str, fallback: object) -> Any:
    """
    A method of a group that carries out plain calls itself, and leaves others to `fallback`.
    """

def set_hooks(
    *,
    num_modes: object,
    profiler: object,
    done: object,
    finished: object,
    started: object,
    messaged: object,
    explain: object,
) -> None:
    """Python's side of the front. To be called once, before the first call."""

class MethodReader:
    """Describes the calls of one method of a group, without making them."""

    def __init__(self, name: str, rank: int, size: int) -> None: ...
    def __call__(self, *args: object, **kwargs: object) -> Description | Problem | None:
        """
        None where Python has to read the call; a problem where the arguments are wrong.
        """

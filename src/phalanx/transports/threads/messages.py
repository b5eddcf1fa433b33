"""Messages of ranks that are threads: sends and receives find each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from phalanx import _native
from phalanx.transports.threads.in_flight import MessageInFlight

__all__ = ["Deliver", "Messages"]

# Copies what was sent to where it is received.
Deliver = Callable[[torch.Tensor, torch.Tensor], None]

_FINISHED = _native.FINISHED
_ANY_SOURCE = _native.ANY_SOURCE


class Messages:
    """Sends that have no receive, and receives that have no message. All methods are called with the group's lock held.

    A send that fits into an envelope, as long as there are envelopes, ends at once: as between processes.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        # By (from, to). Those that have ended wait in an envelope.
        self._sent: dict[tuple[int, int], deque[MessageInFlight]] = {}
        # By receiver.
        self._posted: dict[int, list[MessageInFlight]] = {}

    def find_receive(self, sent: MessageInFlight) -> MessageInFlight | None:
        """Takes out the receive for a message."""
        for posted in self._posted.get(sent.peer, []):
            takes_any = posted.peer == _ANY_SOURCE and sent.rank != posted.rank
            if posted.tag == sent.tag and (takes_any or posted.peer == sent.rank):
                self._posted[sent.peer].remove(posted)
                return posted
        return None

    def find_send(self, receive: MessageInFlight) -> MessageInFlight | None:
        """Takes out the message for a receive."""
        for source in receive.missing():
            channel = self._sent.get((source, receive.rank), ())
            for sent in channel:
                if sent.tag == receive.tag:
                    self._sent[source, receive.rank].remove(sent)
                    return sent
        return None

    def add_send(self, sent: MessageInFlight) -> None:
        """A message without a receive."""
        channel = self._sent.setdefault((sent.rank, sent.peer), deque())
        channel.append(sent)
        if sent.num_bytes <= _native.INLINE_BYTES and len(channel) <= _native.ENVELOPES:
            tensor = sent.tensor
            sent.tensor = torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
            # The receiver need not have come.
            sent.met = sent.made
            self._copy(tensor, sent.tensor)
            sent.end(_FINISHED)

    def add_receive(self, receive: MessageInFlight) -> None:
        """A receive without a message."""
        self._posted.setdefault(receive.rank, []).append(receive)

    def deliver(self, sent: MessageInFlight, receive: MessageInFlight) -> None:
        """Both have found each other, and fit."""
        self._copy(sent.tensor, receive.tensor)
        sent.end(_FINISHED)
        receive.end(_FINISHED)

    def _copy(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        with torch.inference_mode():
            self._deliver(sent, received)

    def put_back(self, sent: MessageInFlight, receive: MessageInFlight) -> None:
        """Both have found each other, and do not fit: they end with the group."""
        self.add_receive(receive)
        if not sent.ended:
            self._sent.setdefault((sent.rank, sent.peer), deque()).append(sent)

    def tags_instead_of(self, late: MessageInFlight) -> list[int]:
        """Of a receive: the tags of messages that came from the ranks for which it waits."""
        sources = [] if late.sends else late.missing()
        return sorted({sent.tag for source in sources for sent in self._sent.get((source, late.rank), ())})

    def pending(self) -> list[MessageInFlight]:
        """Those that have not ended."""
        sent = [message for channel in self._sent.values() for message in channel]
        posted = [receive for receives in self._posted.values() for receive in receives]
        return [message for message in [*sent, *posted] if not message.ended]

    def remove(self, message: MessageInFlight) -> None:
        if message.sends:
            self._sent[message.rank, message.peer].remove(message)
        else:
            self._posted[message.rank].remove(message)

    def clear(self) -> None:
        self._sent.clear()
        self._posted.clear()

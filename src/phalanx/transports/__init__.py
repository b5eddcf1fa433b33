"""How ranks meet, agree and move bytes.

What a group asks of a transport:
    base.py            the protocols
    factory.py         makes transports; another kind joins here
    quick.py           the native way of plain calls
    wrapping.py        a transport around another one
    observed.py        a transport that tells observers of calls
    observers.py       who is told what becomes of groups
    listing.py         observers, makers and wrappers, changed in any thread
    advisers.py        who is asked what transports can't know

Ranks that are processes, over shared memory:
    shm.py             calls as requests to the native core
    pending.py         calls under way
    keeper.py          hears of the ends of calls that no thread waits for
    leaving.py         how long a rank that leaves waits for its peers
    copying.py         owns the copies of a group's calls in flight
    copy_index.py      finds copies by tensor and memory
    written_memory.py  what the core writes for calls in flight
    regions.py         which regions of memory meet
    plain_memory.py    which tensors need copies, and copying

Ranks that only post their calls, and ranks that are threads:
    posting.py         calls that another engine carries out
    threads/           ranks that are threads of one process

How processes come to share a segment:
    rendezvous.py      through a store
    segments.py        makes the segment
    splitting.py       for a smaller group
    arrivals.py        for groups that are merged
    exchange.py        one rank's talk with the others through the store
    hello.py           what ranks tell each other
    identities.py      processes that this one has met
    lookout.py         what became of ranks that do not come
    circles.py         ranks that wait for each other because they make different groups

What went wrong, in words:
    failures.py        failures as exceptions
    reports.py         the report of a mismatch
    signatures.py      descriptions of calls
    refusals.py        notes about calls that a rank refused
    waits.py           waits for calls of other engines
    deadlocks.py       cycles of waits
    slowness.py        how long a call may wait before a warning
    limits.py          which limit of the system was hit
    places.py          which code is the program's own
    levels.py          how much is compared
    recording.py       how black boxes know a group
"""

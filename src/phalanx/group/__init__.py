"""The group itself, and what torch.distributed sees of it.

The group:
    group.py         an identity, a transport and a timeout
    making.py        makes groups as objects
    derived.py       makes groups from a group
    splitting.py     how ranks agree about smaller groups
    merging.py       how ranks take part in a merger
    agreeing.py      what ranks raise that do not agree about another group
    names.py         which group names are taken
    scope.py         the current group
    timeouts.py      which timeouts make sense
    endings.py       how a process leaves its groups when it ends

Calls:
    ops.py           every op as a method
    torch_names.py   the other names that torch calls
    spellings.py     the arguments of these methods, read
    carrying.py      what these methods need of their class
    calling.py       how a group carries out calls
    refusing.py      tells peers of calls that this rank refuses
    dispatching.py   calls under dispatch modes and of tensor subclasses
    profiling.py     calls in torch's profiler
    sparse.py        all_reduce of sparse tensors
    gradients.py     collectives that autograd knows
    work.py          the handles that calls return
    awaiting.py      `await work`

torch:
    process_group.py the class that torch wants, composed of the above
    joined.py        what torch sees of a group beside the calls
    registry.py      what torch calls to make a group
    torch_compat/    torch's private names, by job, and nowhere else
"""

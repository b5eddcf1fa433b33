"""torch's private names, and nowhere else: what changes between torch versions changes here.

    registering   how a backend is registered with torch
    groups        the groups that torch.distributed knows
    options       options objects and reduce ops
    dispatcher    modes and classes of tensors that see calls
    autograd      where a backward pass is
    tracing       what torch.compile and the profiler see
    sparse        the parts of sparse tensors
    standing_in   a group that stands for a plain one
    replacing     another group in place of one that torch has made
    worlds        a world of groups for each rank that is a thread

Import the modules, which load only what they need: `import torch` loads `registering`.
"""

"""Where tensors lie in memory, and which of them share some of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

__all__ = ["Region", "extent", "find_shared", "meet", "region_of", "regions_meet", "touches"]

# From and to which address, how many bytes lie side by side, and the distances in bytes between such runs.
Region = tuple[int, int, int, list[int]]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte to behind the last one."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    start, end, _, _ = region_of(tensor)
    return start, end


def meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share a byte. No: they lie apart, or between each other, as columns of a matrix do."""
    if one.numel() == 0 or other.numel() == 0:
        return False
    return regions_meet(region_of(one), region_of(other))


def touches(tensor: torch.Tensor, start: int, end: int) -> bool:
    """Whether a tensor may have a byte between these addresses."""
    if start >= end or tensor.numel() == 0:
        return False
    return regions_meet(region_of(tensor), (start, end, end - start, []))


def find_shared(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The places in the list of two tensors that share a byte. None: no two of them do."""
    regions = []
    for i, tensor in enumerate(tensors):
        start, size = tensor.data_ptr(), tensor.nbytes
        if start and size:
            region = (start, start + size, size, []) if tensor.is_contiguous() else region_of(tensor)
            regions.append((region, i))
    regions.sort()
    # Of most lists all tensors lie apart.
    if all(one[1] <= other[0] for (one, _), (other, _) in pairwise(regions)):
        return None
    cluster: list[tuple[Region, int]] = []
    reach = 0
    for region, i in regions:
        if region[0] >= reach:
            shared = _find_in_cluster(tensors, cluster)
            if shared is not None:
                return shared
            cluster = []
        cluster.append((region, i))
        reach = max(reach, region[1])
    return _find_in_cluster(tensors, cluster)


def _find_in_cluster(tensors: Sequence[torch.Tensor], cluster: list[tuple[Region, int]]) -> tuple[int, int] | None:
    """Of tensors whose extents overlap: their regions, by address, and their places in the list."""
    period = math.gcd(*(step for (*_, steps), _ in cluster for step in steps))
    if period:
        # All repeat with this period: apart if they lie apart in it, as the columns of a matrix do.
        runs = sorted((start % period, start % period + run) for (start, _, run, _), _ in cluster)
        if all(end <= start for (_, end), (start, _) in pairwise([*runs, (runs[0][0] + period, 0)])):
            return None
    for n, (region, i) in enumerate(cluster):
        for other, j in cluster[n + 1 :]:
            if other[0] >= region[1]:
                break
            if regions_meet(region, other) and _share(tensors[i], tensors[j]):
                return min(i, j), max(i, j)
    return None


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they share a byte, found by comparing the addresses of all elements where nothing else tells."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    mine, theirs = _addresses(one), _addresses(other).sort().values
    # The first element of the other that ends behind the beginning of each of mine.
    nearest = torch.searchsorted(theirs, mine - other.element_size(), right=True)
    inside = nearest < len(theirs)
    return bool((theirs[nearest[inside]] < mine[inside] + one.element_size()).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    addresses = torch.tensor([tensor.data_ptr()])
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        addresses = (addresses[:, None] + torch.arange(size) * (stride * tensor.element_size())).flatten()
    return addresses


def regions_meet(one: Region, other: Region) -> bool:
    """`meet`, where the regions are known."""
    (start, end, run, steps), (other_start, other_end, other_run, other_steps) = one, other
    if start >= other_end or other_start >= end:
        return False
    period = math.gcd(*steps, *other_steps)
    # Both repeat with this period, each within a part of it.
    distance = (other_start - start) % period if period else 0
    return not (period and run <= distance <= period - other_run)


def region_of(tensor: torch.Tensor) -> Region:
    """Of a tensor that has elements."""
    start = tensor.data_ptr()
    width = run = tensor.element_size()
    steps: list[int] = []
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        reach += (size - 1) * stride
        if not steps and stride * width == run:
            run *= size
        else:
            steps.append(stride * width)
    return start, start + (reach + 1) * width, run, steps

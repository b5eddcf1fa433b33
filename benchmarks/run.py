"""Runs all benchmarks: what importing costs, what groups cost in memory, and how fast the collectives are."""

import sys

import collectives
import import_time
import memory
from harness import main

if __name__ == "__main__":
    sys.exit(main(__doc__, import_time.BENCHMARK, memory.BENCHMARK, collectives.BENCHMARK))

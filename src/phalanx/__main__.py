"""python -m phalanx"""

from __future__ import annotations

import sys

from phalanx.commands import main

sys.exit(main())

"""``python -m gvr_topk``: the ``gvr-topk`` command, where the package is on the path but not installed."""

import sys

from gvr_topk.cli import main

if __name__ == "__main__":
    sys.exit(main())

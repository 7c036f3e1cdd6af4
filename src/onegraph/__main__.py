"""`python -m onegraph` is `onegraph`."""

import sys

from onegraph.cli import main

if __name__ == "__main__":
    sys.exit(main())

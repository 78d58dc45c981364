"""`python -m fanin` is `fanin`."""

import sys

from fanin._cli import main

if __name__ == "__main__":
    sys.exit(main())

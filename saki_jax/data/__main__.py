"""The door ``python -m saki_jax.data``; its one command is ``check``."""

import sys

from saki_jax.data import check

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] != ["check"]:
        sys.exit("usage: python -m saki_jax.data check FILE… (see check --help)")
    sys.exit(check.main(arguments[1:]))

"""``python -m mpjax``: the command line."""

from mpjax.cli import main

if __name__ == "__main__":
    main()

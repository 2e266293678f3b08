"""``python -m mpjax``: the command line."""

from mpjax._src.tools.cli.start import main

if __name__ == "__main__":
    main()

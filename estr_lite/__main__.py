"""`python -m estr_lite` is `estr-lite`."""

from estr_lite.cli import main

if __name__ == "__main__":
    main()

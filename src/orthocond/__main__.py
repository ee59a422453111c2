"""``python -m orthocond`` is the command line."""

from orthocond.lab import main

if __name__ == "__main__":
    main()

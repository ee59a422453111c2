"""``python -m orthocond.diagnosis SCRIPT``."""

from orthocond.diagnosis.script import main

if __name__ == "__main__":
    main()

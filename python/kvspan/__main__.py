"""``python -m kvspan``."""

from kvspan.entry import main

if __name__ == "__main__":
    main()

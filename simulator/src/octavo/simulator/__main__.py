"""`python -m octavo.simulator`."""

from octavo.simulator.main import main

if __name__ == "__main__":
    main()

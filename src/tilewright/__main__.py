"""python -m tilewright"""

import sys


def main() -> None:
    try:
        from tilewright.cli import app
    except ModuleNotFoundError as e:
        if e.name not in ("typer", "rich"):
            raise
        sys.exit(f'tilewright: the command line needs {e.name}: pip install "tilewright[cli]"')
    app()


if __name__ == "__main__":
    main()

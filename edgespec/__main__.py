"""``python -m edgespec``: the command line."""

from edgespec.cli.main import app

if __name__ == "__main__":
    app()

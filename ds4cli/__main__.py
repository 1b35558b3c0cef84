"""`python -m ds4cli`."""

from ds4cli.cli import app

app(prog_name="ds4cli")

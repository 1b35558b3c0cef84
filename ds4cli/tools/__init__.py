"""Tool calls: declared, watched, kept inside their grammar, parsed strictly. No mlx in here.

declared.py  the user's tools, read and checked
schema.py    JSON Schema: checking a value
formats.py   how each family writes a call, as data
literals.py  how values are spelled, and reading them
mend.py      JSON: as it is, mended with a note of every change, or refused
reading.py   the text of a call -> names and arguments, one reader per style
parse.py     what that means to the declared tools: ParsedCall, or Refused
detect.py    which format a model has, from a call its template draws
values.py    Lark rules for the values of a schema
lark.py      Lark rules for calls, one writer per style
grammar.py   the rules compiled by llguidance, for one vocabulary
matcher.py   follows one open call with its grammar
forcing.py   what a call's syntax leaves no choice about, as guesses
guard.py     watches a reply, says where to go back to
running.py   a tool's command; tool results as plain text
"""

from ds4cli.tools.declared import Tool, load_tools, tools_of
from ds4cli.tools.detect import detect_format, require_format
from ds4cli.tools.formats import FORMATS, Format
from ds4cli.tools.guard import Guard, GuardEnd, GuardStep
from ds4cli.tools.mend import Refused
from ds4cli.tools.parse import ParsedCall, parse_calls
from ds4cli.tools.running import ToolRun, run_tool

__all__ = [
    "FORMATS",
    "Format",
    "Guard",
    "GuardEnd",
    "GuardStep",
    "ParsedCall",
    "Refused",
    "Tool",
    "ToolRun",
    "detect_format",
    "load_tools",
    "parse_calls",
    "require_format",
    "run_tool",
    "tools_of",
]

"""Tool calls: declared, watched, kept inside their grammar, parsed strictly. No mlx in here.

declared.py  the user's tools, read and checked
schema.py    JSON Schema: what a schema says
checking.py  whether a value fits one
formats.py   how each family writes a call, as data
literals.py  how values are spelled, and reading them
mend.py      JSON: as it is, mended with a note of every change, or refused
reading.py   the text of a call -> names and arguments, one reader per style
parse.py     what that means to the declared tools: ParsedCall, or Refused
detect.py    which format a model has, from a call its template draws
values.py    Lark rules for the values of a schema
lark.py      Lark rules for calls, one writer per style
grammar.py   the rules compiled by llguidance, for one vocabulary
matcher.py   what the grammar lets stand in a reply's calls; follows the open one
layouts.py   a call as a template lays it out
forcing.py   what a grammar leaves no choice about, as guesses
openings.py  where calls, thoughts and code begin in text
state.py     what a guard remembers after a token
steps.py     what a guard says, and when
guard.py     watches a reply, says where to go back to
running.py   a tool's command; tool results as plain text
"""

from ds4cli.tools.declared import Tool, load_tools, tools_of
from ds4cli.tools.detect import detect_format, require_format
from ds4cli.tools.formats import FORMATS, Format
from ds4cli.tools.guard import Guard
from ds4cli.tools.mend import Refused
from ds4cli.tools.parse import ParsedCall, parse_calls
from ds4cli.tools.running import ToolRun, run_tool
from ds4cli.tools.steps import GuardEnd, GuardStep

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

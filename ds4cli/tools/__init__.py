"""Tool calls: declared, watched, kept inside their grammar, parsed strictly. No mlx in here.

declared.py  the user's tools, read and checked
schema.py    JSON Schema: checking a value
formats.py   how each family writes a call, as data
mend.py      JSON: as it is, mended with a note of every change, or refused
parse.py     the text of a call -> ParsedCall, or Refused
literals.py  Lark rules for values that are not JSON
grammar.py   the formats for llguidance
matcher.py   follows one open call with its grammar
guard.py     watches a reply, says where to go back to
running.py   a tool's command; tool results as plain text
"""

from ds4cli.tools.declared import Tool, load_tools, tools_of
from ds4cli.tools.formats import FORMATS, Format, detect_format
from ds4cli.tools.guard import Guard, GuardEnd, GuardStep
from ds4cli.tools.mend import Refused
from ds4cli.tools.parse import ParsedCall, parse_calls
from ds4cli.tools.running import ToolRun, encode_plain, run_tool

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
    "encode_plain",
    "load_tools",
    "parse_calls",
    "run_tool",
    "tools_of",
]

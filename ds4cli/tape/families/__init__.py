"""One file per recurrence. To add one: write its file, then list it in FAMILIES (`recorder.py`).

A family is a module or object with

    name            what people read
    owns(module)    whether this module is handed a recurrent cache that the family understands
    arm(module, swaps)   put the module, and helpers inside it, into recording subclasses

and a `Track` subclass that says how its state moves (see `tracks.py`).
"""

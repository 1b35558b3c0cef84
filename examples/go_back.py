"""Generate, go back to the middle of the reply for nothing, and go on differently.

python examples/go_back.py [MODEL]
"""

import argparse

from ds4cli import Engine


def reply(session, max_tokens):
    """Generate, print, return nothing."""
    for event in session.stream(max_tokens=max_tokens):
        print(event.text, end="", flush=True)
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin", help="folder, hub id or builtin")
    engine = Engine.load(parser.parse_args().model, temp=0.8)
    session = engine.session()
    session.sync(engine.render([{"role": "user", "content": "Name three colours."}]))
    start = session.pos
    reply(session, max_tokens=48)

    middle = (start + session.pos) // 2
    report = session.rewind(middle)
    print(f"[back {report.discarded} tokens with {report.forwards} model calls: {report.source}]")

    session.attempt += 1  # other random numbers; without this the reply would be the same
    reply(session, max_tokens=48)


if __name__ == "__main__":
    main()

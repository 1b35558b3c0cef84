"""Quicker starts for the processes of the tests, which Python runs this in.

`import transformers` reads its thousand model files twice, for their names: half of what it takes
to start `ds4cli generate`. Here the first process keeps these names for the others, in the file
`TRANSFORMERS_NAMES`; `conftest.py` sets it. Nothing else differs from a user's process.
"""

import importlib.machinery
import os
import pickle
import sys

MODULE = "transformers.utils.import_utils"


class Finder:
    """Finds that module as Python does, and puts `kept` around its reading of folders."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            read = module.create_import_structure_from_path
            module.create_import_structure_from_path = kept(read, os.environ["TRANSFORMERS_NAMES"])

        spec.loader.exec_module = exec_module
        return spec


def kept(read, file):
    """`read`, of which `file` has what it gave for the folder of all models."""

    def names(path):
        folder = os.fspath(path).removesuffix("/__init__.py")
        if not folder.endswith("/transformers/models"):
            return read(path)
        try:
            with open(file, "rb") as found:
                return pickle.load(found)
        except FileNotFoundError:
            own = f"{file}.{os.getpid()}"
            with open(own, "wb") as new:
                pickle.dump(read(folder), new)
            os.replace(own, file)
            return names(path)

    return names


if "TRANSFORMERS_NAMES" in os.environ:
    sys.meta_path.insert(0, Finder())

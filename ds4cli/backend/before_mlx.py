"""What has to be done before `mlx.core` is loaded, whoever imports it, and no earlier.

`ds4cli --help` never imports it, and does not wait for a BLAS.
"""

from __future__ import annotations


class Preloader:
    """A finder that finds nothing: it stands first in `sys.meta_path`, so it hears of `mlx.core`
    before that is loaded. It stays: who leaves that list while it is gone through makes Python
    skip the next finder. To be asked again, or by who only asks, changes nothing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Load a BLAS if `name` is `mlx.core`."""
        if name == "mlx.core":
            from ds4cli.backend import blas

            blas.preload()

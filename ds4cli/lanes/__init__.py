"""Several timelines in one model call, each exactly as alone."""

from ds4cli.lanes.arm import Lanes

__all__ = ["Lanes"]

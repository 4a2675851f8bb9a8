"""An engine that calls its integration through an entry point, and whether that may start there."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.signatures import engine_version, find_engine
from gvr_topk.library import library_status


@dataclass(frozen=True)
class Engine:
    """An engine."""

    name: str  # what the log calls it
    package: str
    enable: str  # environment variable that switches the integration
    default: Mode  # where that variable is not set
    supported: tuple[str, ...]  # versions, by two numbers, whose sources the integration was written from
    group: str  # of the entry point ``gvr_topk``

    def root(self) -> Path | None:
        """Return the folder of the installed package; None if there is none."""
        return find_engine(self.package)

    def version(self) -> str:
        """Return the version that is installed."""
        root = self.root()
        return engine_version(root, self.package) if root is not None else "of unknown version"

    def knows(self, version: str) -> bool:
        """Whether the integration was written from this version; a source build is judged by its number."""
        found = re.match(r"\d+\.\d+", version)
        return found is not None and found.group() in self.supported

    def outlook(self) -> tuple[Mode | None, str]:
        """Return what the environment, the version and the library say about this process.

        That is the mode that is asked for, None if it cannot be read, and why the engine is left as it is,
        empty if it is not.
        """
        if environment.disabled():
            return Mode.OFF, f"{environment.DISABLE} is set"
        try:
            asked = environment.user_mode(self.enable)
            environment.verify_calls()
            for switch in (environment.ENABLE_SAMPLER, environment.ENABLE_SLICES, environment.ENABLE_DCP):
                environment.user_mode(switch)
        except ValueError as error:
            return None, str(error)
        mode = asked or self.default
        if mode is Mode.OFF:
            return mode, (f"{self.enable}=0" if asked else f"{self.enable}=1 is not set")
        version = self.version()
        if mode is not Mode.FORCE and not self.knows(version):
            wanted = f"wanted {self.name} {' or '.join(self.supported)}, got {version}"
            return mode, f"{wanted}; {self.enable}=force tries it all the same"
        status = library_status()
        # A torch without CUDA serves CPU tensors, which need no library.
        if not status.loaded and torch.version.cuda is not None:
            return mode, f"the CUDA library is not usable: {status.reason}"
        return mode, ""

    def leave(self, say: Say, reason: str, off: bool = False) -> None:
        """Log why the engine is left as it is; `off` says that the user has not asked for anything else."""
        if off:
            say("info", f"off: {reason}")
        else:
            say("warning", f"refused: {reason}. {self.name} serves with its own top-k")

    def entry_points(self) -> list[str]:
        """Return the functions that installed packages declare for the engine to call."""
        return [e.value for e in importlib.metadata.entry_points(group=self.group, name="gvr_topk")]

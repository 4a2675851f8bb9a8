"""Watch for imports of TensorRT-LLM's modules, and only then call the function that `install` was given.

``gvr_topk_autoload.pth`` runs `install` at the start of every Python process of the environment, because the
worker processes of TensorRT-LLM cannot be reached in any other way: they are started with their parent's
``sys.path`` and import what they unpickle. So this module must cost next to nothing and never fail: it
imports only what Python has loaded by then, and `Finder` compares a few names. It knows nothing of the
integration: the ``.pth`` file names the function to call, and the integration passes its own function.

The ``.pth`` file holds one line, because code in such a file must be one line. It looks for this module on
``sys.path`` before it asks other finders: those of editable installs import ``importlib.util``, which takes
ten times as long as this module. If this module is gone and the file is left, the file does nothing and says
nothing. It runs under ``GVR_TOPK_DISABLE=1`` too, because a YAML file with our keys must stay valid then.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, ClassVar

WATCHED = (
    "tensorrt_llm.llmapi.llm_args",
    "tensorrt_llm._torch.attention_backend.sparse.dsa",
    "tensorrt_llm._torch.attention.backends.sparse.dsa",
    "tensorrt_llm._torch.pyexecutor.sampler.ops.fused",
)
"""Modules after whose import the callback is called."""

DISABLE = "GVR_TOPK_DISABLE"
_NOT_SET = ("", "0", "false", "no", "off")


class Loader:
    """Stands in for a module's loader, and calls `Finder.loaded` once the module has run."""

    def __init__(self, wrapped: Any, finder: type[Finder]) -> None:
        self._wrapped = wrapped
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._wrapped.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._finder.unseen.discard(module.__name__)
        # Put the real loader back first: the module's own attributes must not change.
        if module.__spec__ is not None:
            module.__spec__.loader = self._wrapped
        module.__loader__ = self._wrapped
        self._wrapped.exec_module(module)
        try:
            self._finder.loaded(module.__name__)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an engine must start even if we cannot; SystemExit would end it
            sys.stderr.write(f"gvr_topk: not active: {type(error).__name__}: {error}\n")


_asking = _thread._local()
"""Which finder of ours asks for which module, on this thread."""


class Finder:
    """A ``sys.meta_path`` entry that wraps the loader of the watched modules.

    Integrations that their engine calls itself use a subclass to watch modules of their own.

    Attributes
    ----------
    watched : sequence of str
    callback : callable, str or None
        As `install` takes it; None while nothing is watched.
    unseen : set of str
        Watched modules that have not been imported, as far as the finder knows.
    missed : str
        A watched module that was imported without the finder; empty if there is none.
    """

    watched: Sequence[str] = WATCHED
    callback: ClassVar[Callable[[str], object] | str | None] = None
    unseen: ClassVar[set[str]] = set()
    missed = ""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in cls.watched:
            for name in tuple(cls.unseen):  # another thread may change it
                if sys.modules.get(name) is not None:
                    cls._miss(name)
                    break
            return None
        # Another finder that asks all finders asks this one, too: it must not begin anew.
        asking: set[tuple[type[Finder], str]] = _asking.__dict__.setdefault("names", set())
        if (cls, fullname) in asking:
            return None
        asking.add((cls, fullname))
        try:
            return cls._wrapped_spec(fullname, path, target)
        finally:
            asking.discard((cls, fullname))

    @classmethod
    def _wrapped_spec(
        cls, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is cls or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    wrapped: Any = Loader(spec.loader, cls)
                    spec.loader = wrapped
                return spec
        return None

    @classmethod
    def _miss(cls, name: str) -> None:
        cls.missed, cls.unseen = name, set()
        sys.stderr.write(f"gvr_topk: not active: {name} was imported past the import hook{cls._others()}\n")

    @classmethod
    def _others(cls) -> str:
        """Name the finders of other packages that are asked before this one."""
        ahead = sys.meta_path[: sys.meta_path.index(cls)] if cls in sys.meta_path else []
        types = [finder if isinstance(finder, type) else type(finder) for finder in ahead]
        names = [f"{kind.__module__}.{kind.__name__}" for kind in types if not issubclass(kind, Finder)]
        return f", behind {', '.join(names)}" if names else ""

    @classmethod
    def loaded(cls, name: str) -> None:
        """Call the callback with the name of a watched module that has run."""
        callback = cls.callback
        if isinstance(callback, str):
            owner, _, function = callback.partition(":")
            callback = getattr(__import__(owner, fromlist=(function,)), function)
        if callback is not None:
            callback(name)

    @classmethod
    def watch(cls, callback: Callable[[str], object]) -> None:
        """Call `callback` for each watched module: at once if it is imported already, else once it is."""
        cls.callback = callback
        cls.start()
        for name in cls.watched:
            if name in sys.modules:
                callback(name)

    @classmethod
    def start(cls) -> None:
        """Be asked first for every module. A second call is harmless."""
        if cls not in sys.meta_path:
            sys.meta_path.insert(0, cls)
            cls.unseen, cls.missed = {name for name in cls.watched if name not in sys.modules}, ""

    @classmethod
    def stop(cls) -> None:
        cls.callback = None
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)

    @classmethod
    def state(cls) -> str:
        """Describe for ``gvr-topk doctor`` whether imports are seen; empty if the finder is not asked."""
        if cls not in sys.meta_path:
            return ""
        return f"bypassed: {cls.missed}{cls._others()}" if cls.missed else f"active{cls._others()}"


def disabled() -> bool:
    """Whether ``GVR_TOPK_DISABLE`` keeps the integration from every layer of this process."""
    return os.environ.get(DISABLE, "").strip().lower() not in _NOT_SET


def install(callback: Callable[[str], object] | str) -> None:
    """Start watching. A second call is harmless; the last callback counts.

    Parameters
    ----------
    callback : callable or str
        Called with the name of each watched module once that has been imported. A string
        ``"module:function"`` is imported only then.
    """
    Finder.callback = callback
    Finder.start()


def uninstall() -> None:
    """Stop watching."""
    Finder.stop()

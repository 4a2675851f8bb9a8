"""The configuration that SGLang publishes before it builds its runners."""

from contextlib import contextmanager
from types import SimpleNamespace


class _ConfigBag:
    """Read-only but for `override`."""

    def __init__(self, **leaves):
        vars(self).update(leaves)

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is read-only")

    @contextmanager
    def override(self, **kwargs):
        before = {name: vars(self)[name] for name in kwargs}
        vars(self).update(kwargs)
        try:
            yield self
        finally:
            vars(self).update(before)


_PUBLISHED = SimpleNamespace(server_args=None, exec=None)


def publish(server_args):
    _PUBLISHED.server_args = server_args
    _PUBLISHED.exec = SimpleNamespace(
        kernel=_ConfigBag(sampling_backend=server_args.sampling_backend),
        deterministic=_ConfigBag(
            enable_deterministic_inference=server_args.enable_deterministic_inference,
            rl_on_policy_target=server_args.rl_on_policy_target,
        ),
    )


def get_server_args():
    return _PUBLISHED.server_args


def get_exec():
    return _PUBLISHED.exec

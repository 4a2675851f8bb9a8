from fake_base import get_sm_version

__all__ = ["get_sm_version"]

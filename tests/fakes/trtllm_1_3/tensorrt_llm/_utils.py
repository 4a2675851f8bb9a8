import os


def get_sm_version() -> int:
    return int(os.environ.get("FAKE_SM_VERSION", "90"))

"""Newer versions publish the request pool here; `POOL` stands for that of the attention backend."""

POOL = None


def get_req_to_token_pool():
    assert POOL is not None, "no forward context active"
    return POOL

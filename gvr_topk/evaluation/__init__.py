"""Replay of decode steps, with traces, a generator and readable models of the kernels: what evaluation needs.

Serving imports nothing from here. The packages that these modules need beside gvr-topk's own are those of
the extra ``gvr-topk[replay]``.
"""

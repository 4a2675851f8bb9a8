"""For ``trtllm-serve --custom_module_dirs .../gvr_topk_enable``, where no ``.pth`` file can run.

Imported before the YAML file is read, but in the parent process only: workers need the ``.pth`` file.
"""

from __future__ import annotations

from gvr_topk.integrations.tensorrt_llm import install

install()

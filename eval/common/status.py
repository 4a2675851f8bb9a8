"""Exit statuses of the evaluation scripts.

====  ==============================================================================================
0     the result is there and good
1     a regression; nothing else ever exits with 1
2     wrong use: an option, a configuration, a prompt, or a store that another run holds
3     undecided: runs failed, the feature was not seen to run, or more runs are needed
4     the tool itself failed, for example on a folder it cannot write to
130   interrupted (SIGINT); 143 by SIGTERM and 129 by SIGHUP
====  ==============================================================================================
"""

from __future__ import annotations

REGRESSION = 1
WRONG_USE = 2
UNDECIDED = 3
TOOL_FAULT = 4
INTERRUPTED = 130

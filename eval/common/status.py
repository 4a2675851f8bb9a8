"""Exit statuses of all verbs.

====  ==============================================================================================
0     finished, and what was compared is right
1     something is wrong: a result, a figure, a build, or a regression; nothing else ends with 1
2     wrong use: an option, a missing GPU, file or package, or a store that another run holds
3     undecided: stopped by time, runs failed, or the feature was not seen to run
4     the tool itself failed, for example on a folder it cannot write to
130   interrupted (SIGINT); 143 by SIGTERM and 129 by SIGHUP; 141 when the reader of a pipe has gone
====  ==============================================================================================
"""

REGRESSION = 1
WRONG_USE = 2
UNDECIDED = 3
TOOL_FAULT = 4
INTERRUPTED = 130
BROKEN_PIPE = 141


class InputError(ValueError):
    """A prompt file, a pair of configurations or another input cannot be used: wrong use."""

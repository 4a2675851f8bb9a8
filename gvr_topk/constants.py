"""Enumerations and numbers that C++ and Python share.

Written by packaging/generate_constants.py from the headers under cpp; do not edit.
"""

import enum


class Dtype(enum.IntEnum):
    """Score types, in the order of the kernels' instantiations."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class Path(enum.IntEnum):
    """How a call is served; ``AUTO`` lets the gate and the plan decide."""

    AUTO = 0
    PAPER_GVR = 1
    NO_HINT = 2
    RADIX_ROUNDS = 3


class HintReason(enum.IntEnum):
    """Whether the state of the last step is used for a row, or why not."""

    USED = 0
    DISABLED = 1
    NO_STATE = 2
    NO_SLOT = 3
    SHORT_ROW = 4
    TOO_SHORT = 5
    TOO_LONG = 6
    FIRST_STEP = 7


class Family(enum.IntEnum):
    """Kernels that a plan can launch."""

    PAPER_GVR = 0
    RESIDENT = 1
    STREAMING = 2
    FALLBACK = 3
    SMALL_ROW = 4


class PlanProblem(enum.IntEnum):
    """Why a call cannot be planned as requested."""

    NONE = 0
    CTAS = 1
    PAPER_K = 2
    PAPER_WIDTH = 3
    PAPER_ARCH = 4
    MAX_CTAS = 5
    CTAS_ABOVE_MAX = 6


class GuessSource(enum.IntEnum):
    """Where the first threshold of a row, or the interval around it, came from."""

    NONE = 0
    HINT = 1
    ROW_SAMPLE = 2
    ZSCORE = 3
    VALUE = 4


class SearchEnd(enum.IntEnum):
    """How the search of the paper's kernel for a threshold ended."""

    SHORT = 0
    GUESS = 1
    SECANT = 2
    TIE = 3
    BISECT = 4
    KEY = 5
    TIE_KEY = 6


class StatsColumn(enum.IntEnum):
    """Columns of the statistics tensor."""

    REASON = 0
    PASSES = 1
    CANDIDATES = 2
    SNAP = 3
    HITS = 4
    GUESS = 5
    GUESS_HIT = 6
    DONE = 7


MAX_WIDTH = 2097152
"""Longest row, in elements, that the kernels are built and tested for."""

MAX_ROWS = 67108864
"""Most rows of one call: their blocks fit one launch."""

MAX_PAGE_SIZE = 2147483647
"""Largest page of a page table: positions inside a page are 32-bit numbers."""

MAX_NEXT_N = 1024
"""Most rows of one request."""

MAX_CLUSTER_SIZE = 16
"""Most CTAs that share one row."""

MAX_ELEMENTS_PER_CTA = 1048576
"""Most columns that one CTA holds on the least restricted GPU."""

PAPER_MAX_WIDTH = 262144
"""Widest buffer of the paper's kernel, in elements."""

BLOCK_SIZE = 8
"""Consecutive scores that count as one block."""

MAX_CHOSEN_BLOCKS = 2048
"""Most blocks of a row that are chosen, or selected in."""

ONE_LAUNCH_BLOCKS_WIDTH = 262144
"""Widest buffer of which one launch chooses blocks, in elements."""

PEER_RANKS = 16
"""Most ranks that agree through memory which all of them write into."""

PEER_MAX_K = 2048
"""Most items of a row that ranks choose in that way."""

PEER_CTAS = 64
"""Most CTAs of a launch in which ranks agree."""

PEER_CELLS = 4352
"""Cells of 8 bytes of the records of all ranks that such a CTA receives."""

MAX_TIMEOUT_NS = 86400000000000
"""Longest time that an exchange waits for a rank, in nanoseconds: a day."""

HEADER_WORDS = 3
"""Words of 8 bytes in which ranks have to agree."""

MAX_RANKED_TOKENS = 1024
"""Most tokens of a row that a GPU ranks by their log-probabilities."""

FLAG_PDL = 1
"""Flag: launch with programmatic stream serialization."""

FLAG_QUANTILE_GUESS = 2
"""Flag: the paper's kernel guesses a quantile of the hinted values, not their mean."""

FLAG_CLAMP_PAGES = 4
"""Flag: a row sees no more than its pages hold."""

FLAG_DROP_MASKED = 8
"""Flag: scores of -inf are not selected."""

FLAG_STREAMS = 16
"""Flag, for tests: prefill rows stream, however short they are."""

MIN_ARCH = 90
"""Oldest compute capability served, times ten."""

STATE_FLOATS = 4
"""Numbers of one slot of the state."""

STATE_UNKNOWN = -1.0
"""First number of a slot in which no step has left anything."""

STATE_ZSCORE_ORIGIN = 64.0
"""First number of a slot whose k-th value stood at the mean of the row's sample."""

STATE_MAX_ZSCORE = 16.0
"""Largest distance from that origin, in deviations of the sample."""

STATE_VALUE_ONLY = 96.0
"""First number of a slot that holds a k-th value and no z-score."""

STATE_INFINITE = 112.0
"""First number of a slot whose k-th value was +inf or NaN."""

STATE_MASKED = 128.0
"""First number of a slot whose k-th value was -inf."""

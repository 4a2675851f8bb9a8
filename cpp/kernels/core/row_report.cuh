// The optional statistics of a row.
#pragma once

#include <cstdint>

#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"
#include "ptx/macros.cuh"

namespace gvr_topk {

GVR_DEVICE void write_stats(int32_t* stats, HintReason reason, int passes, int candidates, int snaps,
                            int hits, int guess, bool guess_hit, int done) {
  stats[kStatReason] = static_cast<int32_t>(reason);
  stats[kStatPasses] = passes;
  stats[kStatCandidates] = candidates;
  stats[kStatSnap] = snaps;
  stats[kStatHits] = hits;
  stats[kStatGuess] = guess;
  stats[kStatGuessHit] = guess_hit;
  stats[kStatDone] = done;
}

// The statistics of a row of a prefill chunk.
struct RowReport {
  HintReason reason;
  GuessSource source;
  int passes;
  uint32_t candidates;
  bool guess_hit;
  int rounds;

  GVR_DEVICE static RowReport begin(bool predicts, bool is_short) {
    const HintReason reason = !predicts  ? HintReason::kDisabled
                              : is_short ? HintReason::kShortRow
                                         : HintReason::kFirstStep;
    return RowReport{reason, kGuessNone, 0, 0, false, 0};
  }

  GVR_DEVICE void count_pass(bool by_value, uint32_t count, bool complete) {
    if (by_value) reason = HintReason::kUsed;
    if (passes == 0) source = by_value ? kGuessValue : kGuessRowSample;
    candidates = count;
    guess_hit = complete && passes == 0;
    ++passes;
  }

  GVR_DEVICE void write(int32_t* stats) const {
    write_stats(stats, reason, passes, static_cast<int>(candidates), 0, -1, source, guess_hit, rounds);
  }
};

}  // namespace gvr_topk

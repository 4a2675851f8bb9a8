// The optional statistics of a row.
#pragma once

#include <cstdint>

#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"

namespace gvr_topk {

__device__ __forceinline__ void write_stats(int32_t* stats, HintReason reason, int passes, int candidates,
                                            int snaps, int hits, int guess, bool guess_hit, int done) {
  stats[kStatReason] = static_cast<int32_t>(reason);
  stats[kStatPasses] = passes;
  stats[kStatCandidates] = candidates;
  stats[kStatSnap] = snaps;
  stats[kStatHits] = hits;
  stats[kStatGuess] = guess;
  stats[kStatGuessHit] = guess_hit;
  stats[kStatDone] = done;
}

}  // namespace gvr_topk
